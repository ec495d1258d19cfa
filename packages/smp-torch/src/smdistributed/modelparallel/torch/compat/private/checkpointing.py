"""PyTorch's activation checkpointing, beyond its public API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import checkpoint as native_checkpoint

#: (function, ...) -> what runs before its call, then after it
Around = Callable[..., Iterator[None]]

#: (function, preserve_rng_state, *args) -> result
Reentrant = Callable[..., Any]


def stops_early(arguments: Sequence[Any]) -> bool:
    """Whether a call with ``use_reentrant=False`` is computed again no further than is needed.

    Args:
        arguments: of the generator around the call.
    """
    forced = native_checkpoint._enable_checkpoint_early_stop
    return bool(arguments[5] if forced is None else forced)


@contextlib.contextmanager
def checkpointing_replaced(
    replace: Callable[[Around, Reentrant], tuple[Around, Reentrant]],
) -> Iterator[None]:
    """Replaces the two kinds of torch's activation checkpointing inside the context.

    Libraries keep references to ``torch.utils.checkpoint.checkpoint`` itself (in partial functions,
    by ``from`` imports), so the two things that it looks up when it is called are replaced instead:
    the generator around a call with ``use_reentrant=False``, and the autograd function of the
    other kind.

    Args:
        replace: makes the replacements, given what they replace.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(native_checkpoint, f"{name}_impl"):  # what torch calls from 2.14 on
        name = f"{name}_impl"
    around = getattr(native_checkpoint, name)
    function: Any = native_checkpoint.CheckpointFunction
    own = function.__dict__.get("apply")
    new_around, new_reentrant = replace(around, function.apply)
    setattr(native_checkpoint, name, new_around)
    function.apply = staticmethod(new_reentrant)
    try:
        yield
    finally:
        setattr(native_checkpoint, name, around)
        if own is None:
            del function.apply
        else:
            function.apply = own


@contextlib.contextmanager
def checkpointing_left_out() -> Iterator[None]:
    """Inside, what code checkpoints is called, and nothing is computed again."""

    def around(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with as_reentrant(args):
            return function(*args)

    with checkpointing_replaced(lambda *_: (around, reentrant)):
        yield


def as_reentrant(args: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, a checkpointed function is called as with ``use_reentrant=True``.

    No gradient reaches it but through the tensors that it is given.

    Args:
        args: what it is given.
    """
    return torch.set_grad_enabled(
        torch.is_grad_enabled()
        and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
    )
