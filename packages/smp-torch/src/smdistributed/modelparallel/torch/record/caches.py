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
from collections.abc import Iterator
from typing import Any

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor

_Cached: Any = functools._lru_cache_wrapper
#: What holds nothing, and is most of what caches hold.
_ATOMS = frozenset(map(id, (str, int, float, bool, bytes, type(None), type)))
_CONTAINERS = (list, tuple, set, frozenset)


class FunctionCaches:
    """The caches in which fakes have been found."""

    def __init__(self) -> None:
        self._with_fakes: weakref.WeakSet[Any] = weakref.WeakSet()

    def look_for_new(self) -> None:
        """Looks at all caches; after code has run that had not run before."""
        self._with_fakes.update(each for each in _caches().now() if _holds_fakes(each))

    def clear(self) -> None:
        """Takes fakes out of caches."""
        for cached in self._with_fakes:
            if _holds_fakes(cached):
                cached.cache_clear()


class _Caches:
    """All caches of this process.

    After ``gc.freeze()`` the collector does not tell what there was before. Modules do, but to look
    through them takes a tenth of a second where much has been imported, so this is done again only
    if the collector does not tell of what it told of the last time either.
    """

    def __init__(self) -> None:
        self._mark: list[object] | None = None
        self._in_modules: weakref.WeakSet[Any] = weakref.WeakSet()

    def now(self) -> list[Any]:
        mark = self._mark
        told = [each for each in gc.get_objects() if type(each) is _Cached or each is mark]
        found = {id(each): each for each in told if each is not mark}
        if mark is None or len(found) == len(told):
            self._mark = [self]
            self._in_modules.update(_in_modules())
        return list((found | {id(each): each for each in self._in_modules}).values())


@functools.cache
def _caches() -> _Caches:
    return _Caches()


def _in_modules() -> Iterator[Any]:
    for module in list(sys.modules.values()):
        for each in list(vars(module).values()) if isinstance(module, types.ModuleType) else ():
            # Not isinstance: objects can answer that with code of their own.
            if type(each) is _Cached:
                yield each
            elif issubclass(type(each), type):
                yield from (one for one in vars(each).values() if type(one) is _Cached)


def _holds_fakes(cached: Any) -> bool:
    """Whether fakes are in what a cache holds, which may refer to itself."""
    if not cached.cache_info().currsize:
        return False
    pending = gc.get_referents(cached)
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        kind = type(each)
        if id(kind) in _ATOMS or id(each) in seen:
            continue
        if issubclass(kind, FakeTensor):
            return True
        seen.add(id(each))
        if issubclass(kind, dict):
            pending += [*dict.keys(each), *dict.values(each)]
        elif issubclass(kind, _CONTAINERS) or _is_key(kind):
            pending += gc.get_referents(each)
        elif hasattr(kind, "__dataclass_fields__"):
            pending += vars(each).values() if hasattr(each, "__dict__") else ()
    return False


def _is_key(kind: type) -> bool:
    """Whether it is a class of the cache's own, as of a key and of an entry in a list of uses."""
    return kind.__module__ == "functools"
