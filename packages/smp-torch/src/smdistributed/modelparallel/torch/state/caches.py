"""What ``functools.lru_cache`` keeps of a run on fakes.

A cached function that makes tensors on fakes would give them again when the code runs for real, or
for another microbatch. Only the garbage collector shows what such a cache holds, and nothing takes
one thing out of it: it is cleared, as it may be at any time.

A process has hundreds of caches, nearly all of them PyTorch's and Python's own. After each
recording only those are looked into that may hold something else than the last time.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor

_Cached: Any = functools._lru_cache_wrapper
_BELOW = {"torch", *sys.stdlib_module_names}
_CONTAINERS = (dict, list, tuple, set, frozenset)


class FunctionCaches:
    """The caches in which fakes have been found."""

    def __init__(self) -> None:
        self._with_fakes: weakref.WeakSet[Any] = weakref.WeakSet()

    def look_for_new(self) -> None:
        """Looks at all caches; after code has run that had not run before."""
        known = _caches()
        caches = known.that_may_have_changed()
        if _hold_fakes(caches):
            with_fakes = {each for each in caches if _hold_fakes([each])}
            self._with_fakes.update(with_fakes)
            caches = [each for each in caches if each not in with_fakes]
        known.note_without_fakes(caches)

    def clear(self) -> None:
        """Takes fakes out of caches."""
        for cached in self._with_fakes:
            if cached.cache_info().currsize and _hold_fakes([cached]):
                cached.cache_clear()


def results_in(cached: Any) -> Iterator[Any]:
    """Yields what a cache holds; its own entries, which no one sees, are left out.

    A function that is cached may make an object once for all who ask, such as settings.
    """
    own = getattr(cached, "__dict__", None)
    found = [
        each for each in gc.get_referents(cached) if each is not own and not isinstance(each, type)
    ]
    if cached.cache_info().maxsize is None:
        found = [value for each in found if isinstance(each, dict) for value in each.values()]
    # A cache of a limited size has results in a list, whose elements are in a dict.
    yield from (each for each in found if not _is_of_functools(each))


def _is_of_functools(obj: Any) -> bool:
    values = obj.values() if isinstance(obj, dict) else (obj,)
    return any(type(each).__module__ == "functools" for each in values)


class _Caches:
    """All caches of this process.

    Each refers to its class, so the collector tells of them, and the number of references to the
    class says whether there are others than the last time: to ask the collector takes a tenth of a
    second where much has been imported. After ``gc.freeze()`` it does not tell what there was
    before. Modules do, but to look through them takes as long, so this is done again only if the
    collector does not tell of what it told of the last time either.
    """

    def __init__(self) -> None:
        self._mark: Any = None
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_other_references = -1
        #: What caches without fakes said of themselves then.
        self._infos: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def that_may_have_changed(self) -> list[Any]:
        """Returns those that hold something and may have got a fake since one looked into them."""
        filled = [(each, each.cache_info()) for each in self._now()]
        return [each for each, info in filled if info.currsize and self._infos.get(each) != info]

    def note_without_fakes(self, caches: Iterable[Any]) -> None:
        """Takes note that no fakes are in these, which need not be looked into until they change.

        Those alone that change by calls: what other code has from a cache it may write to later.
        """
        self._infos.update((each, each.cache_info()) for each in caches if _is_below(each))

    def _now(self) -> list[Any]:
        if sys.getrefcount(_Cached) - len(self._known) != self._num_other_references:
            self._look()
            self._num_other_references = sys.getrefcount(_Cached) - len(self._known)
        return list(self._known)

    def _look(self) -> None:
        found = [each for each in gc.get_referrers(_Cached) if type(each) is _Cached]
        self._known.update(found)
        if not any(each is self._mark for each in found):
            self._mark = functools.lru_cache(int)
            self._known.update((self._mark, *_in_modules()))


@functools.cache
def _caches() -> _Caches:
    return _Caches()


def _in_modules() -> Iterator[Any]:
    classes: dict[int, type] = {}
    for module in list(sys.modules.values()):
        for each in list(vars(module).values()) if isinstance(module, types.ModuleType) else ():
            # Not isinstance: objects can answer that with code of their own.
            if type(each) is _Cached:
                yield each
            elif issubclass(type(each), type):
                # Once, however many modules import it.
                classes[id(each)] = each
    for each in classes.values():
        yield from (one for one in vars(each).values() if type(one) is _Cached)


def _is_below(cached: Any) -> bool:
    """Whether a cache is of a function of PyTorch or Python."""
    return str(getattr(cached, "__module__", "")).partition(".")[0] in _BELOW


def _hold_fakes(caches: Sequence[Any]) -> bool:
    """Whether fakes are in what caches hold, which may refer to itself.

    Level by level, since the collector tells of thousands of objects at once, and they are of few
    classes: some libraries keep large tables in caches.
    """
    level = gc.get_referents(*caches)
    seen: dict[int, Any] = {}
    while level:
        kinds = list(map(type, level))
        keys = list(map(id, kinds))
        of_key = dict(zip(keys, kinds, strict=True))
        if any(issubclass(kind, FakeTensor) for kind in of_key.values()):
            return True
        looked_into = {key for key, kind in of_key.items() if _is_container(kind)}
        containers = list(itertools.compress(level, map(looked_into.__contains__, keys)))
        new = dict(zip(map(id, containers), containers, strict=True))
        level = gc.get_referents(*(new[key] for key in new.keys() - seen.keys()))
        seen |= new
    return False


def _is_container(kind: type) -> bool:
    """Whether what objects of a class hold is looked at.

    Classes of ``functools`` are those of a key, and of an entry in a list of uses.
    """
    is_plain = issubclass(kind, _CONTAINERS) or hasattr(kind, "__dataclass_fields__")
    return is_plain or kind.__module__ == "functools"
