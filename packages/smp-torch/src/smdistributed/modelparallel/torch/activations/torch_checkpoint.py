"""Standing in for torch's activation checkpointing.

Libraries keep references to ``torch.utils.checkpoint.checkpoint`` itself (in partial functions, by
``from`` imports), so the two things that it looks up when it is called are replaced instead: the
generator around a call with ``use_reentrant=False``, and the autograd function of the other kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint as native

#: (function, preserve_rng_state, ...) -> what runs before its call, then after it
Around = Callable[..., Iterator[None]]
#: (function, preserve_rng_state, *args) -> result
Reentrant = Callable[..., Any]


@contextlib.contextmanager
def replaced(replace: Callable[[Around, Reentrant], tuple[Around, Reentrant]]) -> Iterator[None]:
    """Replaces the two kinds of checkpointing inside the context.

    Args:
        replace: makes the replacements, given what they replace.
    """
    name = "_checkpoint_without_reentrant_generator"
    around = getattr(native, name)
    own = native.CheckpointFunction.__dict__.get("apply")
    new_around, new_reentrant = replace(around, native.CheckpointFunction.apply)
    setattr(native, name, new_around)
    native.CheckpointFunction.apply = staticmethod(new_reentrant)  # type: ignore[method-assign]
    try:
        yield
    finally:
        setattr(native, name, around)
        if own is None:
            del native.CheckpointFunction.apply
        else:
            native.CheckpointFunction.apply = own  # type: ignore[method-assign]
