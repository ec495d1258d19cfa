"""``smp.optimizers.FusedNovoGrad``: a second moment for each tensor, not for each number.

Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
Networks, 2019.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.optimizers.arguments import check_moments
from smdistributed.modelparallel.torch.optimizers.base import FusedOptimizer

#: The norms that the second moment may follow, as ``norm_type`` numbers them.
_ORDERS = {2: 2.0, 0: float("inf")}


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad with the arguments of apex's class, in plain PyTorch.

    A parameter that is split over tensor-parallel ranks has the second moment of the whole one.
    Wrap it in ``smp.DistributedOptimizer`` like any optimizer of torch. Needs no apex.

    Collective: every rank of the TP_GROUP calls ``step``, if parameters are split.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct the moments for their start.
        betas: how slowly the two moments follow.
        eps: added to the denominator.
        weight_decay: its factor.
        amsgrad: must be False.
        reg_inside_moment: normalise and decay before the first moment; False: in the update.
        grad_averaging: weigh a new gradient by ``1 - betas[0]`` in the first moment; False: by 1.
        norm_type: 2 for the Euclidean norm, 0 for the largest number.
        init_zero: the second moment begins at 0; False: at the norm of the first gradient.
        set_grad_none: ``zero_grad`` drops gradients; False: sets them to zero.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: ``amsgrad`` is True.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """

    #: Read by ``DistributedOptimizer``, of which masters in slices have other norms.
    takes_norms_of_tensors = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_moments("FusedNovoGrad", lr, betas, eps, weight_decay, amsgrad)
        if norm_type not in _ORDERS:
            raise ValueError(
                "FusedNovoGrad takes norm_type 2 (Euclidean) or 0 (the largest number); received "
                f"{norm_type!r}."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.reg_inside_moment = reg_inside_moment

    def _update(self, groups: list[tuple[list[torch.Tensor], dict[str, Any]]]) -> None:
        for parameters, group in groups:
            gradients = [each.grad for each in parameters if each.grad is not None]
            norms = self._norms(parameters, gradients, _ORDERS[group["norm_type"]])
            for parameter, gradient, norm in zip(parameters, gradients, norms, strict=True):
                self._move(parameter, gradient, norm, group)

    def _move(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        norm: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        state, decay = self.state[parameter], group["weight_decay"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            # The norm itself, not its square, under the name that states of apex give it.
            state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        state["step"] += 1
        beta1, beta2 = group["betas"]
        if group["norm_type"] == 2:
            moved = (beta2 * state["exp_avg_sq"].square() + (1 - beta2) * norm.square()).sqrt()
        else:
            moved = beta2 * state["exp_avg_sq"] + (1 - beta2) * norm
        state["exp_avg_sq"].copy_(moved)
        steps = state["step"].item()
        corrections = (1.0, 1.0)
        if group["bias_correction"]:
            corrections = (1 - beta1**steps, (1 - beta2**steps) ** 0.5)
        scale = 1 / (state["exp_avg_sq"] / corrections[1] + group["eps"])
        if self.reg_inside_moment:
            gradient = gradient * scale + decay * parameter
        weight = 1 - beta1 if group["grad_averaging"] else 1.0
        mean = state["exp_avg"].mul_(beta1).add_(gradient.to(parameter.dtype), alpha=weight)
        update = mean / corrections[0]
        if not self.reg_inside_moment:
            update = update * scale + decay * parameter
        parameter -= (group["lr"] * update).to(parameter.dtype)
