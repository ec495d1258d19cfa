"""Numbers that the user's code takes from activations while it is recorded.

``loss.item()`` has no value yet when a step is recorded. It gives a *pending number*: one that can
be returned, stored, and computed with, and that has its value when the step has run. A branch on
it cannot wait: then what comes before is computed ahead of the step (``ahead.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from smdistributed.modelparallel.common.errors import UnsupportedError


class PendingNumber:
    """A number that is known when the step has run; behaves like it from then on.

    Args:
        operands: what it is computed from: pending and plain numbers; none for a number that is
            taken from a tensor.
        function: of the operands.
        tensor: the fake that it is taken from.
        where: names the place in messages.
        ask: returns the number in the fake, while the step is recorded.
    """

    def __init__(
        self,
        operands: tuple[Any, ...] = (),
        function: Callable[..., Any] | None = None,
        tensor: torch.Tensor | None = None,
        where: str = "the step function",
        ask: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self._ask = ask
        self._operands = operands
        self._function = function
        self._known: Any = None
        self._where = where
        self.tensor = tensor

    def settle(self, value: Any) -> None:
        """Gives a number that was taken from a tensor its value."""
        self._known = value
        self.tensor = None

    @property
    def sources(self) -> list[PendingNumber]:
        """The numbers taken from tensors that it is computed from, without their order."""
        if self._function is None:
            return [self]
        found = [
            source
            for each in self._operands
            if isinstance(each, PendingNumber)
            for source in each.sources
        ]
        return list(dict.fromkeys(found))

    def value(self, values: Mapping[PendingNumber, Any] | None = None) -> Any:
        """Returns the number; ``values`` gives those that are not settled.

        Raises:
            UnsupportedError: it is not known yet.
        """
        if self._function is None:
            if values is not None and self in values:
                return values[self]
            if self._known is None:
                if self._ask is None or self.tensor is None:
                    self._refuse()
                self._known = self._ask(self.tensor)
            return self._known
        return self._function(
            *(
                each.value(values) if isinstance(each, PendingNumber) else each
                for each in self._operands
            )
        )

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"{self._where} makes Python depend on the value of an activation (a branch, float() "
            "or a format of what .item() gave). A pipelined step is recorded before values exist: "
            "keep the decision inside one module, return the number from the step function and "
            "look at it outside, or put that module on one partition."
        )

    # ------------------------------------------------------------------ as a number

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Has NumPy take it for a number."""
        return np.asarray(self.value(), dtype)

    def __eq__(self, other: object) -> bool:
        return bool(self.value() == plain(other))

    def __lt__(self, other: Any) -> bool:
        return bool(self.value() < plain(other))

    def __le__(self, other: Any) -> bool:
        return bool(self.value() <= plain(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.value() > plain(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self.value() >= plain(other))

    def __hash__(self) -> int:
        return id(self)

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __repr__(self) -> str:
        return repr(self.value()) if self._is_known else "<known after the step>"

    @property
    def _is_known(self) -> bool:
        # One that was asked for while its step is recorded is still computed with as a tensor.
        return all(each._known is not None and each.tensor is None for each in self.sources)

    def _binary(self, function: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Any:
        if isinstance(other, torch.Tensor):
            if self._function is not None or self.tensor is None:
                number = self.value() if self._is_known else self._on_tensors()
            else:
                number = self.tensor
            return function(other, number) if swapped else function(number, other)
        return self._of((other, self) if swapped else (self, other), function)

    def _of(self, operands: tuple[Any, ...], function: Callable[..., Any]) -> Any:
        """Returns what a function gives of numbers: a plain one if all of them are known."""
        made = PendingNumber(operands, function, where=self._where)
        return made.value() if made._is_known else made

    def _on_tensors(self) -> Any:
        """Returns the computation on the tensors that the numbers are taken from."""
        if self._function is None:
            if self.tensor is None and self._known is None:
                raise UnsupportedError(
                    f"{self._where} gave a number that is used to compute a tensor in a later "
                    "microbatch of the same pipelined step, or behind a step that has failed: all "
                    "microbatches run their Python before anything is computed. Use it after the "
                    "call of the step function, or let one module compute with it."
                )
            return self._known if self.tensor is None else self.tensor
        return self._function(
            *(
                each._on_tensors() if isinstance(each, PendingNumber) else each
                for each in self._operands
            )
        )

    def __neg__(self) -> Any:
        return self._of((self,), operator.neg)

    def __abs__(self) -> Any:
        return self._of((self,), abs)

    def __round__(self, digits: int | None = None) -> Any:
        return self._of((self, digits), round)


def plain(other: Any) -> Any:
    """Returns an object, of a pending number its value; see ``PendingNumber.value``."""
    return other.value() if isinstance(other, PendingNumber) else other


def _add_operators() -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)

        def forward(self: PendingNumber, other: Any, function: Any = function) -> Any:
            return self._binary(function, other, swapped=False)

        def backward(self: PendingNumber, other: Any, function: Any = function) -> Any:
            return self._binary(function, other, swapped=True)

        setattr(PendingNumber, f"__{name}__", forward)
        setattr(PendingNumber, f"__r{name}__", backward)


_add_operators()
