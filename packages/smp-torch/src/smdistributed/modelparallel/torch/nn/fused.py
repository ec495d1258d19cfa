"""What a layer does to each number between its products, in one pass over memory on GPUs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from smdistributed.modelparallel.torch.collectives.sums import sum_of
from smdistributed.modelparallel.torch.compat.fused import fused


@fused
def bias_gelu(inner: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    """Returns the activation of a sum."""
    return F.gelu(inner + bias, approximate=approximate)


@fused
def residual_norm(
    hidden: torch.Tensor,
    bias: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    epsilon: float,
    dtype: torch.dtype | None,
    *parts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a residual sum, its norm, and of each row the mean and one by its deviation.

    Args:
        hidden: what the block read.
        bias: added to the sum of the parts.
        weight: of the norm.
        shift: of the norm.
        epsilon: of the norm.
        dtype: that the norm has; None: that of the sum.
        parts: what the block adds, of each rank.
    """
    total = (sum_of(*parts) + bias) + hidden
    wide = torch.promote_types(total.dtype, torch.float32)
    normed, mean, scale = torch.native_layer_norm(
        total.to(wide), total.shape[-1:], weight.to(wide), shift.to(wide), epsilon
    )
    return total, normed.to(dtype or total.dtype), mean.squeeze(-1), scale.squeeze(-1)


@fused
def residual_norm_gradients(
    total: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    of_total: torch.Tensor | None,
    *parts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of a residual sum, and of bias, weight and shift.

    Args:
        total: the sum.
        mean: of its rows.
        scale: one by the deviation of its rows.
        weight: of the norm.
        of_total: the gradient of the sum itself, if it has one.
        parts: that of its norm, as tensors to be added.
    """
    gradient = sum_of(*parts).to(mean.dtype)
    own, of_weight, of_shift = torch.ops.aten.native_layer_norm_backward(
        gradient,
        total.to(mean.dtype),
        total.shape[-1:],
        mean.unsqueeze(-1),
        scale.unsqueeze(-1),
        weight.to(mean.dtype),
        torch.zeros_like(weight, dtype=mean.dtype),
        [True, True, True],
    )
    if of_total is not None:
        own = own + of_total
    return own.to(total.dtype), own.flatten(0, -2).sum(0), of_weight, of_shift
