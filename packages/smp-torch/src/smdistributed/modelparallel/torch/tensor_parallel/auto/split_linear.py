"""A linear map of which each rank has a slice, inside a module whose calls all ranks compute."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensor_parallel.auto.lanes import added_up
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import sliced_linear
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule
from smdistributed.modelparallel.torch.tensor_parallel.once import differentiated_by, no_further


class Leaves(enum.Enum):
    """What a linear map gives that is split along its inputs."""

    #: The own share, where all that leaves the module is a sum.
    PART_OF_SUM = enum.auto()
    #: So many times the own share as there are ranks, where what every rank has whole is added.
    PART_OF_MEAN = enum.auto()
    #: The sum, of the shares of all ranks.
    SUM = enum.auto()


class Gate:
    """Whether the module that slices belong to is being called.

    Attributes:
        is_open: it is.
        is_whole: each rank computes its own call by itself, with whole weights.
        is_used: a slice is being applied, by the module that has it.
        left_empty: the cache that was given last, and that nothing was put in.
        add_up: returns the sum of what the slices of all ranks give, from the group and the own.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_whole = False
        self.is_used = False
        self.left_empty: Callable[[], object] = lambda: None
        self.add_up = added_up

    def is_used_by(self, name: str) -> bool:
        """Whether a slice is being applied; only one at a time is."""
        return self.is_used


class SplitLinear(DistributedModule, is_part=True):
    """Stands for a linear map in a module that was split by ``auto=True``.

    Split along its outputs it gives the own channels; along its inputs, a share of the sum, to
    which every rank adds an equal share of the bias, or what ``leaves`` says of these shares.

    Shape: ``(..., in)`` to ``(..., out)``, of which one is divided by ``tp_size``.

    Args:
        in_features: of the whole.
        out_features: of the whole.
        bias: has one.
        split: "outputs" or "inputs".
        sections: what is fused in the outputs that are split, as sizes; none where nothing is.
        is_transposed: the weight is (in, out).
        leaves: what it gives if it is split along its inputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        split: str,
        *,
        sections: Sequence[int] = (),
        is_transposed: bool = False,
        leaves: Leaves = Leaves.PART_OF_SUM,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.split = split
        self.is_transposed = is_transposed
        self.leaves = leaves
        self.gate = Gate()
        shape = (in_features, out_features) if is_transposed else (out_features, in_features)
        dim = int((split == "inputs") != is_transposed)
        self.weight = self.add_slice("weight", shape, dim, nn.init.zeros_, sections=sections)
        self.bias: nn.Parameter | None
        if not bias:
            self.register_parameter("bias", None)
        elif split == "outputs":
            self.bias = self.add_slice(
                "bias", (out_features,), 0, nn.init.zeros_, sections=sections
            )
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
        self.gate.is_used = True
        try:
            return self._applied_whole(input) if self.gate.is_whole else self._applied(input)
        finally:
            self.gate.is_used = False

    def _applied(self, given: torch.Tensor) -> torch.Tensor:
        group = self.tensor_group
        weight = self.weight.t() if self.is_transposed else self.weight
        if self.split == "outputs":
            return sliced_linear(group, given, weight, self.bias)
        share = sliced_linear(group, given, weight)
        if self.bias is not None:
            part: torch.Tensor = _Portion.apply(  # type: ignore[no-untyped-call]
                self.bias, 1 / group.size, group.share_of_gradient
            )
            share = share + part.to(share.dtype)
        if self.leaves is Leaves.SUM:
            return self.gate.add_up(group, share)
        return share * group.size if self.leaves is Leaves.PART_OF_MEAN else share

    def _applied_whole(self, given: torch.Tensor) -> torch.Tensor:
        weight = self.whole_of("weight")
        bias = self.bias if self.slice_of("bias") is None else self.whole_of("bias")
        return F.linear(given, weight.t() if self.is_transposed else weight, bias)

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
    @differentiated_by(
        lambda ctx, gradient: (no_further(gradient * ctx.of_gradient, gradient), None, None)
    )
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.of_gradient, None, None
