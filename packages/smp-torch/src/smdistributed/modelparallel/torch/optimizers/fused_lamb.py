"""``smp.optimizers.FusedLamb``: layer-wise adaptive rates for large batches.

You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.torch.optimizers.arguments import check_moments


class FusedLamb(torch.optim.Optimizer):
    """LAMB with the arguments of apex's class, in plain PyTorch.

    Gradients are clipped by their norm over the whole model, of all partitions. Wrap it in
    ``smp.DistributedOptimizer`` like any optimizer of torch. Needs no apex.

    Collective: every rank of the PP_GROUP calls ``step``, if ``max_grad_norm`` is above 0.

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

    #: Read by ``DistributedOptimizer``: slices of tensors have other norms.
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
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients; see ``torch.optim.Optimizer.step``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        limit = self.defaults["max_grad_norm"]
        scale = self._scale(limit) if limit > 0 else 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad * scale, group)
        return loss

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

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
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
        update = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + group["eps"])
        if self.adam_w_mode:
            update += decay * parameter
        rate = group["lr"]
        if decay or self.use_nvlamb:
            rate = rate * _ratio(parameter, update)
        parameter -= (rate * update).to(parameter.dtype)


def _ratio(parameter: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Returns the trust ratio: how large the parameter is beside its update; 1 if one is zero."""
    norms = torch.linalg.vector_norm(parameter.float()), torch.linalg.vector_norm(update.float())
    is_usable = (norms[0] > 0) & (norms[1] > 0)
    return torch.where(is_usable, norms[0] / norms[1], torch.ones_like(norms[0]))
