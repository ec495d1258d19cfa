"""What a layer does to each number between its products, in one pass over memory on GPUs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from smdistributed.modelparallel.torch.compat.private.fusion import fused


@fused
def bias_gelu(inner: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    """Returns the activation of a sum."""
    return F.gelu(inner + bias, approximate=approximate)


@fused
def bias_residual(summed: torch.Tensor, bias: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the residual sum of a block without a norm."""
    return (summed + bias) + hidden


@fused
def bias_residual_norm(
    summed: torch.Tensor,
    bias: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the residual sum, and its norm."""
    total = (summed + bias) + hidden
    return total, F.layer_norm(total, total.shape[-1:], weight, shift, epsilon)
