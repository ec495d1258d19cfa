"""``smp.optimizers.FusedLamb``: layer-wise adaptive rates for large batches.

You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.optimizers.arguments import check_moments
from smdistributed.modelparallel.torch.optimizers.base import FusedOptimizer


class FusedLamb(FusedOptimizer):
    """LAMB with the arguments of apex's class, in plain PyTorch.

    Gradients are clipped by their norm over the whole model, of all partitions; a parameter that is
    split over tensor-parallel ranks has the norms of the whole one. Wrap it in
    ``smp.DistributedOptimizer`` like any optimizer of torch. Needs no apex.

    Collective: every rank of the MP_GROUP calls ``step``, if ``max_grad_norm`` is above 0; else
    those of the TP_GROUP, if parameters are split.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct the moments for their start at zero.
        betas: how slowly the two moments follow.
        eps: added to the denominator.
        weight_decay: its factor.
        amsgrad: must be False.
        adam_w_mode: decay the weights in the update; False: in the gradient.
        grad_averaging: weigh a new gradient by ``1 - betas[0]`` in the first moment; False: by 1.
        set_grad_none: ``zero_grad`` drops gradients; False: sets them to zero.
        max_grad_norm: gradients of a larger norm are scaled down to it; 0: none are.
        use_nvlamb: adapt the rate of parameters without weight decay too.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: ``amsgrad`` is True.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions;
    model-parallel-customize-training-script-pt.md.
    """

    #: Read by ``DistributedOptimizer``, of which masters in slices have other norms.
    takes_norms_of_tensors = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        check_moments("FusedLamb", lr, betas, eps, weight_decay, amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb

    def _update(self, groups: list[tuple[list[torch.Tensor], dict[str, Any]]]) -> None:
        limit = self.defaults["max_grad_norm"]
        scale = self._scale(limit) if limit > 0 else 1.0
        for parameters, group in groups:
            # Slices wait for one another, as one exchange has the norms of all.
            waits = self.whole_norms is not None
            for some in [parameters] if waits else [[each] for each in parameters]:
                self._move(some, scale, group)

    def _move(
        self, parameters: list[torch.Tensor], scale: torch.Tensor | float, group: dict[str, Any]
    ) -> None:
        updates = [self._direction(each, scale, group) for each in parameters]
        rates = [group["lr"]] * len(parameters)
        if group["weight_decay"] or self.use_nvlamb:
            norms = self._norms([*parameters] * 2, [*parameters, *updates], 2.0)
            pairs = zip(norms[: len(parameters)], norms[len(parameters) :], strict=True)
            rates = [group["lr"] * _ratio(norm, move) for norm, move in pairs]
        for parameter, rate, update in zip(parameters, rates, updates, strict=True):
            parameter -= (rate * update).to(parameter.dtype)

    def _scale(self, limit: float) -> torch.Tensor | float:
        """Returns what gradients are multiplied by. Collective: PP_GROUP."""
        gradients = [
            each.grad
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        # While the library runs, this is the norm over all partitions.
        norm = torch.nn.utils.get_total_norm(gradients)
        return (limit / norm).clamp(max=1.0)

    def _direction(
        self, parameter: torch.Tensor, scale: torch.Tensor | float, group: dict[str, Any]
    ) -> torch.Tensor:
        """Moves the moments of a parameter, and returns where it is to go."""
        assert parameter.grad is not None
        gradient = parameter.grad * scale
        state, decay = self.state[parameter], group["weight_decay"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        if not self.adam_w_mode:
            gradient = gradient + decay * parameter
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        steps = state["step"].item()
        corrections = (1.0, 1.0)
        if group["bias_correction"]:
            corrections = (1 - beta1**steps, 1 - beta2**steps)
        update: torch.Tensor = (mean / corrections[0]) / (
            (square / corrections[1]).sqrt() + group["eps"]
        )
        if self.adam_w_mode:
            update += decay * parameter
        return update


def _ratio(norm: torch.Tensor, move: torch.Tensor) -> torch.Tensor:
    """Returns the trust ratio: how large a parameter is beside its update; 1 if one is zero."""
    return torch.where((norm > 0) & (move > 0), norm / move, torch.ones_like(norm))
