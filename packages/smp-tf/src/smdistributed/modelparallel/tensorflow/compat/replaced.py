"""Functions of others that stand replaced for a while, in the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

_INHERITED = object()


class Replacement(NamedTuple):
    """One function to be replaced.

    Attributes:
        owner: class or module that has it.
        name: of the function there.
        make: takes it as it is, returns what takes its place.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


@contextlib.contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Within, all these functions are replaced; before and after it, none is.

    Raises:
        AttributeError: an owner has no such function.
    """
    saved: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, make in replacements:
            original = getattr(owner, name)
            saved.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, make(original))
        yield
    finally:
        for owner, name, own in reversed(saved):
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
