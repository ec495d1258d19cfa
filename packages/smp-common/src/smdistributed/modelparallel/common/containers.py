"""Containers of Python taken apart, and built again around other values.

Lists and other mutable sequences, tuples (named ones too), sets, mappings, and instances of data
classes and attrs classes. A rebuilt container is of the original's class and keeps what that holds
besides its items: a default factory, attributes of a subclass of list.
"""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import enum
import types
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

from smdistributed.modelparallel.common.errors import UnsupportedError

_NUMBERS = (bytes, bytearray, memoryview, array.array)


class Container:
    """A container, taken apart.

    Attributes:
        skeleton: what a rebuilt container starts from: one of its class, of which a copy is made,
            or what makes one.
        kind: how items go in: "keys" and "fields" into a copy, as items and attributes; "sequence"
            and "mapping" to what makes one, as a list of values and as a dict.
        items: key, attribute or position -> item.
    """

    def __init__(self, skeleton: Any, kind: str, items: dict[Any, Any]) -> None:
        self.skeleton = skeleton
        self.kind = kind
        self.items = items

    @property
    def is_copied(self) -> bool:
        """Whether a rebuilt container starts from a copy of one."""
        return self.kind in ("keys", "fields")

    def build(self, values: Mapping[Any, Any]) -> Any:
        """Returns a new container of the original class around ``values``.

        Raises:
            UnsupportedError: a copy of the original would be the original.
        """
        if self.kind == "sequence":
            make = getattr(self.skeleton, "_make", self.skeleton)  # of a named tuple
            return make(list(values.values()))
        if self.kind == "mapping":
            return self.skeleton(dict(values))
        built = _clone(self.skeleton)
        for key, value in values.items():
            if self.kind == "keys":
                built[key] = value
            else:
                object.__setattr__(built, key, value)
        if self.kind == "keys":
            self._check_own_items(values)
        return built

    def _check_own_items(self, values: Mapping[Any, Any]) -> None:
        """Raises if values went into the original as well."""
        for key, old in self.items.items():
            if values[key] is not old and values[key] is not None:
                if self.skeleton[key] is values[key]:
                    self.skeleton[key] = old
                    name = type(self.skeleton).__qualname__
                    raise UnsupportedError(
                        f"a copy of a {name} shares its items with the original, so that no part "
                        f"can be made of it: give {name} a __copy__, or smp_slice."
                    )
                return


def take_apart(value: Any) -> Container | None:
    """Returns the parts of a container; None for anything else, and for the class of one."""
    if type(value) is list or isinstance(value, (tuple, set, frozenset)):
        return Container(type(value), "sequence", _numbered(value))
    if isinstance(value, MutableSequence) and not isinstance(value, _NUMBERS):
        return Container(value, "keys", _numbered(value))
    if isinstance(value, MutableMapping):
        return Container(value, "keys", dict(value))
    if isinstance(value, Mapping):
        return Container(type(value), "mapping", dict(value))
    if isinstance(value, (type, enum.Enum)):
        return None
    if dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__"):
        return Container(value, "fields", attributes_of(value))
    return None


def attributes_of(value: object) -> dict[str, Any]:
    """Returns the attributes that an instance has of its own, in slots too."""
    return slots_of(value) | dict(getattr(value, "__dict__", {}))


def slots_of(value: object) -> dict[str, Any]:
    """Returns what is in the slots of an instance, by the names that ``getattr`` takes.

    A slot ``__x`` of class ``C`` is ``_C__x``. Slots that are empty are left out, and those that a
    subclass has hidden by one of the same name.
    """
    found: dict[str, Any] = {}
    for slot in slots_in(type(value)):
        with contextlib.suppress(AttributeError):
            found.setdefault(slot.__name__, slot.__get__(value))
    return found


def slots_in(kind: type) -> Iterator[types.MemberDescriptorType]:
    """Yields the slots that instances of a class have, those of the class itself first."""
    for base in kind.__mro__:
        if "__slots__" in vars(base):  # what classes written in C show of their own is no slot
            members = vars(base).values()
            yield from (each for each in members if isinstance(each, types.MemberDescriptorType))


def _numbered(values: Any) -> dict[Any, Any]:
    return dict(enumerate(values))


def _clone(original: Any) -> Any:
    """Returns a shallow copy; containers that the original is made around are copied, too."""
    clone = copy.copy(original)
    own: dict[str, Any] = getattr(clone, "__dict__", {})
    shared = getattr(original, "__dict__", {})
    for name, value in own.items():
        if isinstance(value, (dict, list)) and shared.get(name) is value:
            own[name] = copy.copy(value)
    return clone
