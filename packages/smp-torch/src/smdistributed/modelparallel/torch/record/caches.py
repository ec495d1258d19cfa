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
from smdistributed.modelparallel.torch.record.nested import tensors_in

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
    if not cached.cache_info().currsize:
        return False
    held = gc.get_referents(cached)
    inside = [each for one in held if type(one) is dict for each in (*one.keys(), *one.values())]
    return any(
        isinstance(tensor, FakeTensor) for each in (*held, *inside) for tensor in tensors_in(each)
    )
