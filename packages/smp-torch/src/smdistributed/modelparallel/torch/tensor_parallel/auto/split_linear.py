"""A linear map of which each rank has a slice, inside a module whose calls all ranks compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import sliced_linear
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


class Gate:
    """Whether the module that slices belong to is being called."""

    def __init__(self) -> None:
        self.is_open = False


class SplitLinear(DistributedModule):
    """Stands for an ``nn.Linear`` in a module that was split by ``auto=True``.

    Split along its outputs it gives the own channels; along its inputs, a share of the sum, to
    which every rank adds an equal share of the bias.

    Shape: ``(..., in)`` to ``(..., out)``, of which one is divided by ``tp_size``.

    Args:
        in_features: of the whole.
        out_features: of the whole.
        bias: has one.
        split: "outputs" or "inputs".
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, split: str) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.split = split
        self.gate = Gate()
        dim = 0 if split == "outputs" else 1
        self.weight = self.add_slice("weight", (out_features, in_features), dim, nn.init.zeros_)
        self.bias: nn.Parameter | None
        if not bias:
            self.register_parameter("bias", None)
        elif split == "outputs":
            self.bias = self.add_slice("bias", (out_features,), 0, nn.init.zeros_)
        else:
            self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Applies the slice.

        Raises:
            SMPError: not inside the module that it belongs to.
        """
        if not self.gate.is_open:
            raise SMPError(
                f"{self.place} is a slice, which the module around it uses; code outside of that "
                "module has called it. Exclude it: smp.set_tensor_parallelism(module, False)."
            )
        group = self.tensor_group
        if self.split == "outputs":
            return sliced_linear(group, input, self.weight, self.bias)
        share = sliced_linear(group, input, self.weight)
        if self.bias is None:
            return share
        part: torch.Tensor = _Portion.apply(  # type: ignore[no-untyped-call]
            self.bias, 1 / group.size, group.share_of_gradient
        )
        return share + part.to(share.dtype)

    def extra_repr(self) -> str:
        """Returns the sizes of the whole, and what is split."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, split={self.split}"
        )


class _Portion(torch.autograd.Function):
    """The share of a whole parameter in a sum over ranks; its gradient counts as said."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, share: float, of_gradient: float) -> Any:
        ctx.of_gradient = of_gradient
        return parameter * share

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.of_gradient, None, None
