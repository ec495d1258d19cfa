"""Objects with state of their own that checkpointed calls are given: a cache, say.

A call that is computed again finds them as they were when it was made: a layer that adds to a cache
would else find there what it has added itself, and what later layers have.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import pytree
from smdistributed.modelparallel.torch.state.contents import copied
from smdistributed.modelparallel.torch.tensors.nested import opaque_objects

#: No call changes them, or it does so to a module, whose state has rules of its own.
_APART = (type, nn.Module)


def finding_objects_again(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Returns what calls a function with the objects in its arguments as they are now.

    The first call is given the objects themselves; later ones, copies of what they are now, with
    the same tensors. Objects that cannot be copied are given as they are.

    Args:
        function: what is checkpointed.
        args: by position, of the call that is about to be made.
        kwargs: by name.
    """
    objects = {
        id(each): each
        for each in opaque_objects((args, kwargs))
        if not isinstance(each, _APART) and not callable(each)
    }
    if not objects:
        return function
    try:
        kept = copied(objects)
    except (TypeError, copy.Error):
        return function
    turns = itertools.chain([objects], (copied(kept) for _ in itertools.repeat(None)))

    def call(*args: Any, **kwargs: Any) -> Any:
        now = next(turns)
        args, kwargs = pytree.tree_map(
            lambda each: now.get(id(each), each),
            (args, kwargs),
            is_leaf=lambda each: id(each) in objects,
        )
        return function(*args, **kwargs)

    return call
