"""What transformer layers are made of: split projections, norms, residual sums."""

from __future__ import annotations

import math

import torch
from torch import nn

from smdistributed.modelparallel.torch.nn.fused_layer_norm import FusedLayerNorm
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule, Initialise


class Projection(DistributedModule):
    """The weight and bias of a linear map that a layer applies; split along outputs or inputs.

    Args:
        in_features, out_features: channels of all ranks together.
        split: which of them are split; the bias is split with the outputs, else whole.
        bias: has one.
        deviation: standard deviation of normal initial values, with biases of zero; None gives
            those of ``nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        split: str,
        bias: bool = True,
        deviation: float | None = None,
    ) -> None:
        super().__init__()
        self.split = split
        is_column = split == "outputs"
        bound = 1 / math.sqrt(in_features)

        def weigh(weight: torch.Tensor) -> None:
            if deviation is None:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            else:
                nn.init.normal_(weight, std=deviation)

        def shift(each: torch.Tensor) -> None:
            if deviation is None:
                nn.init.uniform_(each, -bound, bound)
            else:
                nn.init.zeros_(each)

        self.weight = self.add_slice(
            "weight", (out_features, in_features), 0 if is_column else 1, weigh
        )
        self.bias: nn.Parameter | None
        if not bias:
            self.register_parameter("bias", None)
        elif is_column:
            self.bias = self.add_slice("bias", (out_features,), 0, shift)
        else:
            self.bias = nn.Parameter(_filled(out_features, shift))

    def forward(self) -> None:
        """Raises: the layer around it applies it."""
        raise NotImplementedError("a projection is applied by the layer that it is a part of.")


def norm(hidden_size: int, epsilon: float) -> FusedLayerNorm:
    """Returns a norm over the channels of own examples; ones and zeros at first.

    Scripts know by its class that it has no weight decay.
    """
    return FusedLayerNorm(hidden_size, eps=epsilon)


def check_norms(who: str, pre: bool, post: bool) -> None:
    """Raises unless a block has a norm.

    Raises:
        ValueError: it has none.
    """
    if not pre and not post:
        raise ValueError(
            f"{who}: at least one of pre_layernorm and post_layernorm must be True; received "
            "False for both."
        )


def residual(
    branch: torch.Tensor, hidden: torch.Tensor, post: nn.LayerNorm | None, *, in_fp32: bool
) -> torch.Tensor:
    """Returns the sum of a block and its raw input, normed if it ends in a norm."""
    if in_fp32 and hidden.dtype != torch.float32:
        total = branch.float() + hidden.float()
        if post is not None:
            weight, bias = post.weight.float(), post.bias.float()
            total = nn.functional.layer_norm(total, post.normalized_shape, weight, bias, post.eps)
        return total.to(hidden.dtype)
    total = branch + hidden
    return total if post is None else post(total)


def _filled(size: int, initialise: Initialise) -> torch.Tensor:
    tensor = torch.empty(size)
    with torch.no_grad():
        initialise(tensor)
    return tensor
