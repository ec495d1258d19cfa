"""Nested Python structures with tensors in them.

Two operations: ``map_tensors`` copies a structure with a function applied to each tensor, and
``template`` turns it into plain data with a placeholder for each tensor, from which ``fill`` builds
the structure again. Both keep the classes of containers.

Containers are lists, tuples (named and structseq too), mappings and dataclasses. Anything else is
a constant; one that hides mutable state is refused, since a captured step would freeze it.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError

_CONSTANT_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    enum.Enum,
    range,
    types.EllipsisType,
    types.FunctionType,
    types.BuiltinFunctionType,
    functools.partial,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.Generator,
    torch.nn.Module,
)
#: Containers that templates keep as they are; exactly these classes, no subclasses.
_PLAIN_TYPES = (list, tuple, dict, slice)


class Container:
    """A container of a class of its own, taken apart.

    Attributes:
        skeleton: an empty or shallow copy that a rebuilt container starts from.
        kind: how items go in: "keys", "fields" or "sequence".
        items: key, field name or position -> template.
    """

    def __init__(self, skeleton: Any, kind: str, items: dict[Any, Any]) -> None:
        self.skeleton = skeleton
        self.kind = kind
        self.items = items

    def build(self, values: Mapping[Any, Any]) -> Any:
        """Returns a new container of the original class around ``values``."""
        if self.kind == "sequence":
            return _make_sequence(self.skeleton, list(values.values()))
        built = copy.copy(self.skeleton)
        for key, value in values.items():
            if self.kind == "keys":
                built[key] = value
            else:
                object.__setattr__(built, key, value)
        return built


def take_apart(obj: Any) -> Container | None:
    """Returns the parts of a container that is no plain list, tuple or dict; else None."""
    if isinstance(obj, torch.Size):
        return None
    if isinstance(obj, tuple | list):
        return Container(type(obj), "sequence", dict(enumerate(obj)))
    if isinstance(obj, collections.abc.MutableMapping):
        return Container(obj, "keys", dict(obj))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
        return Container(obj, "fields", fields)
    return None


def map_tensors(obj: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Returns a copy of ``obj`` with ``function`` applied to each tensor in it."""
    if isinstance(obj, torch.Tensor):
        return function(obj)
    inner = functools.partial(map_tensors, function=function)
    if type(obj) in _PLAIN_TYPES:
        return _map_plain(obj, inner)
    parts = take_apart(obj)
    if parts is None:
        return obj
    mapped = {key: inner(item) for key, item in parts.items.items()}
    if all(mapped[key] is item for key, item in parts.items.items()):
        return obj
    return parts.build(mapped)


def tensors_in(obj: Any) -> list[torch.Tensor]:
    """Returns the tensors in a structure, in the order in which ``map_tensors`` visits them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(obj, note)
    return found


def template(obj: Any, placeholder: Callable[[torch.Tensor], Any], where: str) -> Any:
    """Returns ``obj`` as plain data, each tensor replaced by its placeholder.

    Args:
        obj: any structure.
        placeholder: gives what stands for a tensor.
        where: names the place in error messages.

    Raises:
        UnsupportedError: ``obj`` holds an object with state of its own.
    """
    if isinstance(obj, torch.Tensor):
        return placeholder(obj)
    inner = functools.partial(template, placeholder=placeholder, where=where)
    if type(obj) in _PLAIN_TYPES:
        return _map_plain(obj, inner)
    parts = take_apart(obj)
    if parts is not None:
        skeleton = parts.skeleton
        if parts.kind != "sequence":
            # The skeleton must not keep the captured tensors alive.
            skeleton = parts.build(dict.fromkeys(parts.items))
        return Container(
            skeleton, parts.kind, {key: inner(item) for key, item in parts.items.items()}
        )
    if not isinstance(obj, _CONSTANT_TYPES):
        raise UnsupportedError(
            f"{where} passes an object of class {type(obj).__module__}.{type(obj).__qualname__} "
            "between partitions; only tensors, containers of tensors and plain constants can be "
            "passed. Keep the object inside one module, or put the modules that share it on one "
            "partition (for a key-value cache of Transformers: use_cache=False)."
        )
    return obj


def placeholders(obj: Any, kind: type) -> Iterator[Any]:
    """Yields the placeholders of class ``kind`` in a template, in order."""
    if isinstance(obj, kind):
        yield obj
    elif isinstance(obj, Container):
        yield from placeholders(obj.items, kind)
    elif type(obj) in (list, tuple):
        for item in obj:
            yield from placeholders(item, kind)
    elif type(obj) is dict:
        for item in obj.values():
            yield from placeholders(item, kind)
    elif type(obj) is slice:
        yield from placeholders((obj.start, obj.stop, obj.step), kind)


def fill(obj: Any, kind: type, value: Callable[[Any], Any]) -> Any:
    """Builds a structure from a template, each placeholder replaced by its value."""
    if isinstance(obj, kind):
        return value(obj)
    inner = functools.partial(fill, kind=kind, value=value)
    if isinstance(obj, Container):
        return obj.build({key: inner(item) for key, item in obj.items.items()})
    return _map_plain(obj, inner) if type(obj) in _PLAIN_TYPES else obj


#: One step into a structure: ("item", key) or ("attribute", name).
Path = tuple[tuple[str, Any], ...]


def tensor_paths(obj: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yields every tensor in a structure with the way to reach it."""
    if isinstance(obj, torch.Tensor):
        yield path, obj
        return
    if isinstance(obj, torch.Size):
        return
    if isinstance(obj, tuple | list):
        for index, item in enumerate(obj):
            yield from tensor_paths(item, (*path, ("item", index)))
    elif isinstance(obj, collections.abc.Mapping):
        for key, item in obj.items():
            yield from tensor_paths(item, (*path, ("item", key)))
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield from tensor_paths(getattr(obj, field.name), (*path, ("attribute", field.name)))
    elif _hides_tensors(obj):
        raise UnsupportedError(
            f"a module returned an object of class {type(obj).__qualname__} that holds tensors; "
            "return tensors, containers of tensors or dataclasses, or put the module and the "
            "users of its result on one partition (for a key-value cache of Transformers: "
            "use_cache=False)."
        )


def follow(obj: Any, path: Path) -> Any:
    """Returns what stands at ``path`` in a structure."""
    for kind, key in path:
        obj = obj[key] if kind == "item" else getattr(obj, key)
    return obj


def _map_plain(obj: Any, inner: Callable[[Any], Any]) -> Any:
    """Returns a copy of a plain container with ``inner`` applied to what it holds."""
    if type(obj) is dict:
        return {key: inner(item) for key, item in obj.items()}
    if type(obj) is slice:
        return slice(inner(obj.start), inner(obj.stop), inner(obj.step))
    return type(obj)(inner(item) for item in obj)


def _make_sequence(kind: Any, items: list[Any]) -> Any:
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _hides_tensors(obj: Any) -> bool:
    if isinstance(obj, torch.nn.Module | type) or not hasattr(obj, "__dict__"):
        return False
    return any(isinstance(item, torch.Tensor) for item in vars(obj).values())
