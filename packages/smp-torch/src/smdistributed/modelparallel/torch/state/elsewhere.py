"""What modules of other ranks have left in an object, in a rank's copy of it: stand-ins.

They look like what they stand for, so that what counts entries, or asks for a shape, finds what it
would in one process. What computes with one learns that its numbers are on another rank.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.below import past_operations, without_memory
from smdistributed.modelparallel.torch.compat.private.modes import (
    past_recording,
    past_subclass_functions,
)
from smdistributed.modelparallel.torch.state.contents import (
    Contents,
    Effects,
    Opaque,
    Reference,
    items_of,
    refill,
    tensors_held,
    walked,
)
from smdistributed.modelparallel.torch.tensors.nested import is_plain_value, same


class ElsewhereError(UnsupportedError):
    """A module needs what is elsewhere."""


class TensorElsewhere(torch.Tensor):
    """Stands for a tensor; it has its shape and type, and no memory."""

    told: str

    @classmethod
    def of(cls, tensor: torch.Tensor, where: str) -> TensorElsewhere:
        """Returns one.

        Args:
            tensor: that it stands for.
            where: says who has left it, and where.
        """
        shape, dtype, device = tuple(tensor.shape), tensor.dtype, tensor.device
        with past_recording(), past_subclass_functions(), past_operations():
            made: TensorElsewhere = torch.empty(0, dtype=dtype, device=device).as_subclass(cls)
            made.data = without_memory(shape, dtype, device)
        made.told = where
        return made

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> NoReturn:
        """Says that it is elsewhere.

        Raises:
            ElsewhereError: always.
        """
        _refuse(next(each for each in tensors_held([args, kwargs]) if isinstance(each, cls)).told)

    def __deepcopy__(self, memo: Any) -> TensorElsewhere:
        """Returns itself: nothing changes it."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is."""
        return f"TensorElsewhere(shape={tuple(self.shape)}, that {self.told})"


class NumberElsewhere(Opaque):
    """Stands for a number that may be another one in each call, as a mean of activations is.

    Args:
        where: says who has left it, and where.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __deepcopy__(self, memo: Any) -> NumberElsewhere:
        return self

    def __repr__(self) -> str:
        return f"<a number that {self._where}>"

    def __hash__(self) -> int:
        return id(self)


def _refuse(where: str) -> NoReturn:
    raise ElsewhereError(
        f"A module computes with what {where}. Put the modules that share it on one partition (for "
        "a key-value cache of Transformers: or use_cache=False), or return it and pass it on as a "
        "tensor."
    )


def _add_operators() -> None:
    def combined(self: NumberElsewhere, *others: Any) -> Any:
        if any(isinstance(each, torch.Tensor) for each in others):
            _refuse(self._where)
        return self  # a sum that goes on is as unknown

    def asked(self: NumberElsewhere, *others: Any) -> Any:
        _refuse(self._where)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(NumberElsewhere, f"__{name}__", combined)
        setattr(NumberElsewhere, f"__r{name}__", combined)
    for name in ("neg", "abs", "round"):
        setattr(NumberElsewhere, f"__{name}__", combined)
    for name in ("float", "int", "bool", "index", "eq", "ne", "lt", "le", "gt", "ge", "format"):
        setattr(NumberElsewhere, f"__{name}__", asked)


_add_operators()


def as_elsewhere(effects: Effects, contents: Contents, where: str) -> Effects:
    """Returns what was done to an object as ranks see it that have not done it.

    Args:
        effects: what was done.
        contents: of the object before, as such ranks see it.
        where: says who has done it, and where.
    """

    def seen(item: Any) -> Any:
        if not isinstance(item, Reference):
            return _stand_in(item, where)
        # Who leaves a number that another has left there may leave another one in its place.
        meant = contents.meant(item)
        return meant if isinstance(meant, NumberElsewhere) else item

    return [(place, {key: seen(item) for key, item in items.items()}) for place, items in effects]


def _stand_in(item: Any, where: str) -> Any:
    """Returns an item with stand-ins for tensors and numbers in it."""
    if type(item) is float:
        return NumberElsewhere(where)
    memo: dict[int, Any] = {
        id(each): TensorElsewhere.of(each, where) for each in tensors_held(item)
    }
    made = copy.deepcopy(item, memo)
    if type(made) is tuple:
        return tuple(NumberElsewhere(where) if type(each) is float else each for each in made)
    if not isinstance(made, torch.Tensor):
        for node, items in Contents(made).nodes():
            if any(type(each) is float for each in items.values()):
                refill(
                    node,
                    {
                        key: NumberElsewhere(where) if type(each) is float else each
                        for key, each in items.items()
                    },
                )
    return made


def fits(outline: Any, obj: Any) -> bool:
    """Whether an object looks as an outline says; a number elsewhere may be any."""

    def is_number(want: Any, got: Any) -> bool:
        return want is float and isinstance(got, float)

    return _fits_at_once(outline, obj) or same(outline, outline_of(obj), is_number)


def _fits_at_once(outline: Any, obj: Any) -> bool:
    """Whether an object fits that has nothing in it but tensors, constants and the like.

    This runs for each layer of a model that is given a cache, in each microbatch.
    """
    (kind, _), nodes = outline
    if len(nodes) != 1 or type(obj) is not kind or isinstance(nodes[0], int):
        return False
    items = items_of(obj)
    return len(items) == len(nodes[0]) and all(
        key == name
        and (
            item is want
            or (type(item) is torch.Tensor and want == _look(item))
            or (type(item) in _PLAIN and type(item) is type(want) and item == want)
        )
        for (key, item), (name, want) in zip(items.items(), nodes[0], strict=True)
    )


_PLAIN = (int, str, torch.device)


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def looks_of(effects: Effects) -> Any:
    """Returns what was done to an object, as plain data: of tensors and numbers what they are."""
    return [
        (place, [(key, outline_of(item)) for key, item in items.items()])
        for place, items in effects
    ]


def outline_of(obj: Any) -> Any:
    """Returns what is in an object, as plain data: of tensors, and numbers elsewhere, the looks."""
    nodes, _ = walked(obj)
    places = {id(node): place for place, node in enumerate(nodes)}

    def looks(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _look(item)
        if isinstance(item, NumberElsewhere):
            return float
        if is_plain_value(item) or isinstance(item, Reference):
            return item
        if isinstance(item, tuple):
            return tuple(map(looks, item))
        return type(item), places.get(id(item))

    def inside(node: Any) -> Any:
        if isinstance(node, set):
            return len(node)
        return [(key, looks(item)) for key, item in items_of(node).items()]

    return looks(obj), [inside(node) for node in nodes]
