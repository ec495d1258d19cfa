"""What a call does on a device, in terms from which a cost follows: counted, or to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.tensors import is_of_leaf
from smdistributed.modelparallel.torch.tensors.nested import template, tensors_in, text


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

    def __sub__(self, other: Work) -> Work:
        """Returns what is left without another's counts; operations have none."""
        return Work(
            self.flops - other.flops,
            self.weight_flops - other.weight_flops,
            self.moved - other.moved,
            self.kernels - other.kernels,
            self.products - other.products,
            self.half_products - other.half_products,
            self.weight_products - other.weight_products,
            self.moved_bytes - other.moved_bytes,
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.weight_flops + other.weight_flops,
            self.moved + other.moved,
            self.kernels + other.kernels,
            self.products + other.products,
            self.half_products + other.half_products,
            self.weight_products + other.weight_products,
            self.moved_bytes + other.moved_bytes,
            self.operations + other.operations,
        )


@dataclass(frozen=True)
class Layout:
    """A tensor without its numbers: what the time of an operation on it depends on.

    Attributes:
        shape, stride, dtype, device_type: its own.
        requires_grad: a backward pass computes its gradient.
        is_of_parameter: and adds it to that of a leaf.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    is_of_parameter: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Returns that of a tensor."""
        needed = tensor.requires_grad and torch.is_grad_enabled()
        stride = tensor.stride() if tensor.layout is torch.strided else ()
        own = needed and is_of_leaf(tensor)
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device.type, needed, own)

    def __str__(self) -> str:
        gradient = " with gradient" if self.requires_grad else ""
        leaf = " of a leaf" if self.is_of_parameter else ""
        return f"{self.dtype}{self.shape}{self.stride} {self.device_type}{gradient}{leaf}"


@dataclass(frozen=True)
class Operation:
    """A call of the dispatcher.

    Attributes:
        function: that is called.
        args, kwargs: its arguments; a ``Layout`` stands for each tensor.
        flops: floating-point operations, as counted.
    """

    function: Any
    args: Any
    kwargs: Any
    flops: int


@dataclass
class Operations:
    """The different operations of runs on fakes: calls with equal layouts and numbers are one.

    Attributes:
        known: by name, which says everything that its time depends on.
    """

    known: dict[str, Operation] = field(default_factory=dict)

    def name(self, function: Any, args: Sequence[Any], kwargs: Any, flops: int) -> str:
        """Returns the name of an operation, and keeps what it takes to make it again."""
        given = (tuple(args), dict(kwargs))
        args, kwargs = template(given, Layout.of, lambda obj: obj)
        name = f"{function}{text((args, kwargs), str)}"
        if name not in self.known:
            self.known[name] = Operation(function, args, kwargs, flops)
        return name


def makes_tensors(function: Any, out: Any) -> bool:
    """Whether an operation computes: a view takes no time, and a check gives nothing."""
    return not function.is_view and bool(tensors_in(out))
