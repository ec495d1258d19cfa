"""What proofs have read of a module that was split, as it was then and as it is now.

A proof is one of a copy. A script may change attributes, hooks and modules afterwards: where the
proof has read them, it says nothing any more.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.containers import slots_of
from smdistributed.modelparallel.torch.state.identities import Identities
from smdistributed.modelparallel.torch.state.reads import EVERYTHING


class MISSING:
    """Stands for what is not there."""


_OWN_PACKAGE = __name__.partition(".")[0]
_OF_MODULES = frozenset(vars(nn.Module()))
HOOKS = frozenset(name for name in _OF_MODULES if name.endswith("_hooks"))
#: Those that run when a module is called, or differentiated.
HOOKS_OF_CALLS = frozenset(name for name in HOOKS if "forward" in name or "backward" in name)
#: Tensors, what is known otherwise, and what is compared by itself.
_APART = _OF_MODULES - HOOKS
#: Proofs are without what these do.
_DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
#: What is what it is, and has nothing in it that a script would change.
_WHOLE = (nn.Module, torch.Tensor, type)

Name = tuple[str, str]


class SeenState:
    """The state of a module and those in it, by their names.

    Args:
        module: that has just been split.
    """

    def __init__(self, module: nn.Module) -> None:
        self._look_at(module)

    def _look_at(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules())
        self._before: dict[Name, list[Any]] = {}
        self._read: Collection[Name] = ()
        #: The containers of what counts, when nothing was another.
        self._places: Identities | None = None
        for owner, inner in self._modules.items():
            for attribute in (*vars(inner), *inner._modules):
                if attribute not in _APART:
                    self._before[owner, attribute] = _contents(inner, attribute)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module has other containers, which are looked for when it is asked."""
        return {**vars(self), "_places": None}

    def look_again(self) -> None:
        """Takes the state as it is now for the one that was seen, of which nothing is read yet.

        It is the same object afterwards: to assign another would change the module.
        """
        self._look_at(self._modules[""])

    def read(self, read: Collection[Name]) -> None:
        """Takes what proofs have read for what counts."""
        names: dict[Name, None] = {}
        for owner, attribute in sorted(read):
            if attribute == EVERYTHING and owner in self._modules:
                names.update(dict.fromkeys(each for each in self._before if each[0] == owner))
            elif attribute not in _APART and owner in self._modules:
                names[owner, attribute] = None
        for owner, inner in self._modules.items():
            if isinstance(inner, _DROPOUT):
                names.pop((owner, "p"), None)
        for each in names.keys() - self._before.keys():
            # Of a class, which the copy has too: the proof is of what it has now.
            self._before[each] = _contents(self._modules[each[0]], each[1])
        self._read = list(names)
        self._places = None

    def changed(self) -> list[Name]:
        """Returns what is another now of what counts."""
        # Asked at each call of a layer: containers that are as they were need no walk.
        if self._places is not None and self._places.are_current():
            return []
        found = [
            each
            for each in self._read
            if not _are_same(self._before[each], _contents(self._modules[each[0]], each[1]))
        ]
        if not found:
            self._places = self._places_now()
        return found

    def _places_now(self) -> Identities:
        containers: dict[int, Any] = {}
        slots: list[tuple[Any, str]] = []
        for owner in dict.fromkeys(owner for owner, _ in self._read):
            module = self._modules[owner]
            spaces = [vars(kind) for kind in type(module).__mro__ if _is_of_script(kind)]
            for each in (vars(module), module._modules, *spaces):
                containers[id(each)] = each
        for owner, attribute in self._read:
            module = self._modules[owner]
            if attribute in HOOKS:
                hooks = value_of(module, attribute)
                containers[id(hooks)] = hooks
            else:
                value = _value(module, attribute)
                containers.update((id(each), each) for each in _containers_in(value, set()))
                slots += _slots_in(value, set())
        found = containers.values()
        return Identities(
            [each for each in found if isinstance(each, Mapping)],
            [each for each in found if not isinstance(each, Mapping)],
            slots,
        )


def value_of(module: nn.Module, attribute: str) -> Any:
    """Returns what a module has by a name: itself, or as a module in it; ``MISSING`` if nothing."""
    found = vars(module).get(attribute, MISSING)
    return module._modules.get(attribute, MISSING) if found is MISSING else found


def hooks_of_others(hooks: dict[int, Any]) -> list[Any]:
    """Returns the hooks of a module but for the library's own, which come and go by themselves."""
    return [each for each in hooks.values() if not _is_of_library(each)]


def _contents(module: nn.Module, attribute: str) -> list[Any]:
    """Returns the objects by a name, and those in it."""
    if attribute in HOOKS:
        return hooks_of_others(value_of(module, attribute))
    return list(_objects_in(_value(module, attribute), set()))


def _value(module: nn.Module, attribute: str) -> Any:
    """Returns what a module, or its class, has by a name; ``MISSING`` if nothing."""
    value = value_of(module, attribute)
    if value is MISSING:
        spaces = (vars(kind) for kind in type(module).__mro__)
        value = next((space[attribute] for space in spaces if attribute in space), MISSING)
    return value


def _objects_in(value: Any, around: set[int]) -> Iterator[Any]:
    yield value
    if id(value) in around:
        return
    around = {*around, id(value)}
    for each in _inside(value):
        yield from _objects_in(each, around)


def _inside(value: Any) -> tuple[Any, ...]:
    """Returns the objects in a container or an object, if they count; names and keys too."""
    container = _container(value)
    inner = () if container is None else _items(container)
    return (*inner, *_items(_slots(value)))


def _containers_in(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    container = _container(value)
    if container is not None and not isinstance(container, tuple | frozenset):
        yield container
    for each in _inside(value):
        yield from _containers_in(each, seen)


def _slots_in(value: Any, seen: set[int]) -> Iterator[tuple[Any, str]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    for name in _slots(value):
        yield value, name
    for each in _inside(value):
        yield from _slots_in(each, seen)


def _slots(value: Any) -> dict[str, Any]:
    is_whole = isinstance(value, _WHOLE) or _is_of_library(value)
    return {} if is_whole else slots_of(value)


def _container(value: Any) -> Any:
    """Returns where an object keeps others that count; None if nowhere, or in slots."""
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, dict | list | tuple | set | frozenset):
        return value
    if isinstance(getattr(value, "__dict__", None), dict) and not _is_of_library(value):
        return vars(value)
    return None


def _items(container: Any) -> tuple[Any, ...]:
    is_dict = isinstance(container, Mapping)
    return (*container, *container.values()) if is_dict else tuple(container)


def _is_of_script(kind: type) -> bool:
    """Whether a class may have attributes that a script changes."""
    return kind is not nn.Module and kind.__module__.partition(".")[0] not in (
        "builtins",
        _OWN_PACKAGE,
    )


def _is_of_library(obj: Any) -> bool:
    name = getattr(obj, "__module__", None) or type(obj).__module__
    return str(name).startswith(_OWN_PACKAGE)


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))
