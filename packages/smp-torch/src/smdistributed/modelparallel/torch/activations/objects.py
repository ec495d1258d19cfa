"""Objects with state of their own that checkpointed calls are given: a cache, say.

A call that is computed again finds them as they were when it was made: a layer that adds to a cache
would else find there what it has added itself, and what later layers have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import pytree
from smdistributed.modelparallel.torch.state.contents import copied
from smdistributed.modelparallel.torch.tensors.nested import opaque_objects

#: No call changes them, or it does so to a module, whose state has rules of its own.
_APART = (type, nn.Module)

_Given = tuple[tuple[Any, ...], dict[str, Any]]


class Place:
    """Stands for an object in the arguments that torch keeps for the call that comes again.

    The object itself would keep the graph alive, which it has tensors of.

    Args:
        obj: the object.

    Attributes:
        obj: it, until the first call has begun.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def take(self) -> Any:
        """Returns the object, once."""
        obj, self.obj = self.obj, None
        return obj


def given_objects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the objects with state that a checkpointed call is given, before it is made.

    Args:
        args: by position, as torch is given them.
        kwargs: by name.
    """
    found = opaque_objects((tuple(args), dict(kwargs)))
    objects = [each.obj if isinstance(each, Place) else each for each in found]
    return [each for each in objects if not isinstance(each, _APART) and not callable(each)]


def finding_objects_again(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns what calls a function with the objects in its arguments as they are now.

    The first call is given the objects themselves; later ones, copies of what they are now, with
    the same tensors. Objects that cannot be copied are given as they are.

    Args:
        function: what is checkpointed.
        args: by position, of the call that is about to be made.
        kwargs: by name.

    Returns:
        a function, and what it is to be called with.
    """
    if torch.compiler.is_compiling():  # what is compiled runs no Python again
        return function, args, kwargs
    objects = list({id(each): each for each in given_objects(args, kwargs)}.values())
    try:
        kept = copied(objects)
    except (TypeError, copy.Error):
        objects = []
    if not objects:
        return function, args, kwargs
    places = [*map(Place, objects)]

    def call(*args: Any, **kwargs: Any) -> Any:
        is_first = places[0].obj is not None
        now = [each.take() for each in places] if is_first else copied(kept)
        args, kwargs = _with_others(places, now, (args, kwargs))
        del now
        return function(*args, **kwargs)

    return call, *_with_others(objects, places, (args, kwargs))


def _with_others(ones: Sequence[Any], others: Sequence[Any], given: _Given) -> _Given:
    """Returns arguments with other objects in them."""
    found = {id(one): other for one, other in zip(ones, others, strict=True)}
    ids = frozenset(found)  # what tells leaves outlives the call, in a cycle of torch's
    made: _Given = pytree.tree_map(
        lambda each: found.get(id(each), each), given, is_leaf=lambda each: id(each) in ids
    )
    return made
