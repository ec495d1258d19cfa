"""``smp.optimizers.FusedAdam``: Adam and AdamW by torch's fused kernels.

Source: model-parallel-customize-training-script-pt.md, Unsupported Framework Features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam

from smdistributed.modelparallel.torch.optimizers.arguments import check_moments
from smdistributed.modelparallel.torch.optimizers.base import FusedOptimizer


class FusedAdam(FusedOptimizer):
    """Adam with the arguments of apex's class, computed by torch's fused kernel.

    Wrap it in ``smp.DistributedOptimizer`` like any optimizer of torch. Needs no apex.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct the moments for their start at zero.
        betas: how slowly the two moments follow.
        eps: added to the denominator.
        adam_w_mode: decay the weights in the update (AdamW); False: in the gradient.
        weight_decay: its factor.
        amsgrad: must be False.
        set_grad_none: ``zero_grad`` drops gradients; False: sets them to zero.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: ``amsgrad`` is True.

    Source: model-parallel-customize-training-script-pt.md, Unsupported Framework Features.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_moments("FusedAdam", lr, betas, eps, weight_decay, amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.adam_w_mode = adam_w_mode

    def _update(self, groups: list[tuple[list[torch.Tensor], dict[str, Any]]]) -> None:
        for parameters, group in groups:
            self._update_group(parameters, group)

    def _update_group(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(each) for each in parameters]
        steps = [each["step"] for each in states]
        if not group["bias_correction"]:
            for step in steps:
                step += 1
            # As after infinitely many steps, when nothing is left to correct.
            steps = [torch.full_like(step, torch.inf) for step in steps]
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            [each.grad for each in parameters],  # type: ignore[misc]
            [each["exp_avg"] for each in states],
            [each["exp_avg_sq"] for each in states],
            [],
            steps,
            fused=True,
            has_complex=False,
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        # The kernel wants it beside the parameter, wherever a loaded state had it.
        state["step"] = state["step"].to(parameter.device)
        return state
