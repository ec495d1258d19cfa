"""What a call does on a device, in terms from which a cost follows: counted, or to be timed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.tensors import is_of_leaf
from smdistributed.modelparallel.torch.tensors.nested import template, tensors_in, text
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

_NO_COUNTS = ("operations", "spans")


@dataclass(frozen=True)
class Work:
    """What one or several calls do.

    Attributes:
        flops: floating-point operations of the forward pass, as counted by PyTorch.
        weight_flops: those of products with a weight.
        moved: of the former, what stands for moving memory, where that takes the time.
        kernels: operations that compute something, each by a kernel of its own on a GPU.
        products: floating-point operations of products, those of half precision like others.
        half_products: of them, those whose results are in half precision.
        weight_products: of them, those of products with a weight.
        moved_bytes: what operations read and write that are no products.
        operations: the names of the operations that reached the dispatcher, in ``Operations``;
            empty where costs are counted.
        spans: where they stand on the tape of their microbatch.
    """

    flops: int = 0
    weight_flops: int = 0
    moved: int = 0
    kernels: int = 0
    products: int = 0
    half_products: int = 0
    weight_products: int = 0
    moved_bytes: int = 0
    operations: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def __sub__(self, other: Work) -> Work:
        """Returns what is left without another's counts; what is no count is left out."""
        return Work(**self._counted(other, operator.sub))

    def __add__(self, other: Work) -> Work:
        work = Work(**self._counted(other, operator.add))
        return dataclasses.replace(
            work,
            operations=self.operations + other.operations,
            spans=self.spans + other.spans,
        )

    def _counted(self, other: Work, of: Callable[[int, int], int]) -> dict[str, Any]:
        """Returns what becomes of each count with another's."""
        names = (each.name for each in dataclasses.fields(self) if each.name not in _NO_COUNTS)
        return {name: of(getattr(self, name), getattr(other, name)) for name in names}


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation is given, as far as its time depends on it.

    Attributes:
        spec: of the tensor; it requires a gradient if a backward pass computes one.
        is_of_parameter: which that adds to the gradient of a leaf.
    """

    spec: TensorSpec
    is_of_parameter: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """Returns what stands for a tensor."""
        needed = tensor.requires_grad and torch.is_grad_enabled()
        spec = TensorSpec.of(tensor)._replace(requires_grad=needed)
        if tensor.layout is not torch.strided:
            spec = spec._replace(stride=())  # of which no tensor is made
        return cls(spec, needed and is_of_leaf(tensor))

    def __str__(self) -> str:
        spec = self.spec
        gradient = " with gradient" if spec.requires_grad else ""
        leaf = " of a leaf" if self.is_of_parameter else ""
        return f"{spec.dtype}{spec.shape}{spec.stride} {spec.device.type}{gradient}{leaf}"


@dataclass(frozen=True)
class Operation:
    """A call of the dispatcher.

    Attributes:
        function: that is called.
        args, kwargs: its arguments; an ``Operand`` stands for each tensor.
        flops: floating-point operations, as counted.
        products: of them, those of a product.
    """

    function: Any
    args: Any
    kwargs: Any
    flops: int
    products: int


@dataclass
class Operations:
    """The different operations of runs on fakes: calls with equal operands and numbers are one.

    Attributes:
        known: by name, which says everything that its time depends on.
    """

    known: dict[str, Operation] = field(default_factory=dict)

    def name(
        self, function: Any, args: Sequence[Any], kwargs: Any, flops: int, products: int
    ) -> str:
        """Returns the name of an operation, and keeps what it takes to make it again."""
        given = (tuple(args), dict(kwargs))
        args, kwargs = template(given, Operand.of, lambda obj: obj)
        name = f"{function}{text((args, kwargs), str)}"
        if name not in self.known:
            self.known[name] = Operation(function, args, kwargs, flops, products)
        return name


def makes_tensors(function: Any, out: Any) -> bool:
    """Whether an operation computes: a view takes no time, and a check gives nothing."""
    return not function.is_view and bool(tensors_in(out))
