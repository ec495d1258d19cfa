"""What ``functools.lru_cache`` keeps of a run on fakes.

A cached function that makes tensors on fakes would give them again when the code runs for real, or
for another microbatch. Only the garbage collector shows what such a cache holds, and nothing takes
one thing out of it: it is cleared, as it may be at any time.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from typing import Any

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor

_Cached: Any = functools._lru_cache_wrapper


class FunctionCaches:
    """The caches in which fakes have been found."""

    def __init__(self) -> None:
        self._with_fakes: weakref.WeakSet[Any] = weakref.WeakSet()

    def look_for_new(self) -> None:
        """Looks at all caches; after code has run that had not run before."""
        self._with_fakes.update(each for each in _all_caches() if _holds_fakes(each))

    def clear(self) -> None:
        """Takes fakes out of caches."""
        for cached in self._with_fakes:
            if _holds_fakes(cached):
                cached.cache_clear()


def _all_caches() -> list[Any]:
    found = {id(each): each for each in gc.get_objects() if type(each) is _Cached}
    # After gc.freeze() the collector does not tell what there was before.
    for module in list(sys.modules.values()):
        for each in list(vars(module).values()) if isinstance(module, types.ModuleType) else ():
            found.update(
                (id(one), one)
                # Not isinstance: objects can answer that with code of their own.
                for one in (each, *(vars(each).values() if issubclass(type(each), type) else ()))
                if type(one) is _Cached
            )
    return list(found.values())


def _holds_fakes(cached: Any) -> bool:
    """Whether fakes are in what a cache holds, which may refer to itself."""
    if not cached.cache_info().currsize:
        return False
    pending = gc.get_referents(cached)
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        kind = type(each)
        if issubclass(kind, FakeTensor):
            return True
        if id(each) in seen:
            continue
        seen.add(id(each))
        if issubclass(kind, dict):
            pending += [*dict.keys(each), *dict.values(each)]
        elif issubclass(kind, list | tuple | set | frozenset) or _is_key(kind):
            pending += gc.get_referents(each)
        elif hasattr(kind, "__dataclass_fields__"):
            pending += vars(each).values() if hasattr(each, "__dict__") else ()
    return False


def _is_key(kind: type) -> bool:
    """Whether it is a class of the cache's own, as of a key and of an entry in a list of uses."""
    return kind.__module__ == "functools"
