"""A number taken from an absent tensor.

``parameter.grad.norm().item()`` of another partition is asked for on some ranks only, so it has
no value there. What is added up over all partitions has one: it is computed when Python looks at
it, by ``float()``, a comparison or a format.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import pytree


class AbsentNumber:
    """A number that behaves like Python's, as far as the ranks of the pipeline can compute it.

    Args:
        tensor: an absent one with one element.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        self._tensor = tensor.detach().reshape(()).to(wide)

    def value(self) -> Any:
        """Returns the number. Collective: PP_GROUP, the first time.

        Raises:
            UnsupportedError: the ranks cannot compute it together.
        """
        return self._tensor.tolist()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets functions of torch take it for the tensor that it is from."""
        given = cls.as_tensors((tuple(args), dict(kwargs or {})))
        return func(*given[0], **given[1])

    @classmethod
    def as_tensors(cls, structure: Any) -> Any:
        """Returns a structure with tensors in place of such numbers."""
        return pytree.tree_map(
            lambda each: each._tensor if isinstance(each, cls) else each, structure
        )

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value(), digits)

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor(self.value()).numpy().__array__(*args)

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        return type(self.value()), (self.value(),)

    def __repr__(self) -> str:
        return f"<a number on another partition: {self._tensor!r}>"

    def __neg__(self) -> AbsentNumber:
        return AbsentNumber(-self._tensor)

    def __abs__(self) -> AbsentNumber:
        return AbsentNumber(abs(self._tensor))

    def _with(self, function: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Any:
        own = self._tensor
        if isinstance(other, torch.Tensor):
            own = own.to(other.dtype) if other.is_floating_point() else own
            return function(other, own) if swapped else function(own, other)
        if isinstance(other, AbsentNumber):
            other = other._tensor
        elif isinstance(other, int | float):
            other = torch.tensor(other, dtype=torch.int64 if type(other) is int else torch.float64)
        else:
            return NotImplemented
        if function in (operator.truediv, operator.pow):
            own, other = own.double(), other.double()
        return AbsentNumber(function(other, own) if swapped else function(own, other))

    def _compared(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        other = other.value() if isinstance(other, AbsentNumber) else other
        return function(self.value(), other)


def _add_operators() -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)

        def forward(self: AbsentNumber, other: Any, function: Any = function) -> Any:
            return self._with(function, other, swapped=False)

        def backward(self: AbsentNumber, other: Any, function: Any = function) -> Any:
            return self._with(function, other, swapped=True)

        setattr(AbsentNumber, f"__{name}__", forward)
        setattr(AbsentNumber, f"__r{name}__", backward)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(operator, name)

        def compare(self: AbsentNumber, other: Any, function: Any = function) -> Any:
            return self._compared(function, other)

        setattr(AbsentNumber, f"__{name}__", compare)


_add_operators()
