"""Nested Python structures with tensors in them.

Two operations: ``map_tensors`` copies a structure with a function applied to each tensor, and
``template`` turns it into plain data with a placeholder for each tensor, from which ``fill`` builds
the structure again. Both keep the classes of containers.

Containers are those of ``common.containers``, what is registered with ``torch.utils._pytree``, and
objects that know how they are split. Anything else is a constant, or an opaque object with state of
its own.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from smdistributed.modelparallel.common import containers
from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.torch.compat.private.nodes import flatten_node, is_node

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
#: Constants that are what they look like; the others are compared by identity.
_VALUE_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
#: Containers that templates keep as they are; exactly these classes, no subclasses.
_PLAIN_TYPES = (list, tuple, dict, slice)
#: What is no container for sure, without a closer look: most arguments of functions of torch.
_WITHOUT_PARTS = frozenset({*_VALUE_TYPES} - {enum.Enum, range})


def take_apart(obj: Any) -> Container | None:
    """Returns the parts of a container, plain ones too; None for everything else."""
    if isinstance(obj, torch.Size | torch.nn.Module):
        return None
    parts = containers.take_apart(obj)
    if parts is not None:
        # Only tensors have parts of microbatches; a set of other things is a constant.
        is_set = isinstance(obj, set | frozenset)
        return parts if not is_set or any(map(torch.is_tensor, obj)) else None
    if is_node(obj):
        items, build = flatten_node(obj)
        return Container(build, "sequence", dict(enumerate(items)))
    if hasattr(type(obj), "smp_slice"):
        return Container(obj, "fields", containers.attributes_of(obj))
    return None


def map_tensors(obj: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Returns a copy of ``obj`` with ``function`` applied to each tensor in it."""
    if isinstance(obj, torch.Tensor):
        return function(obj)
    if type(obj) in _WITHOUT_PARTS:
        return obj
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
    _collect(obj, found)
    return found


def is_plain_value(obj: Any) -> bool:
    """Whether an object is a constant that is what it looks like: a number, a text, a type."""
    return isinstance(obj, _VALUE_TYPES)


def opaque_objects(obj: Any) -> list[Any]:
    """Returns the objects in a structure that are neither tensors, containers nor plain values."""
    if isinstance(obj, (torch.Tensor, *_VALUE_TYPES)):
        return []
    if type(obj) is dict:
        return [each for item in obj.values() for each in opaque_objects(item)]
    if type(obj) is slice:
        return []
    if type(obj) in _PLAIN_TYPES:
        return [each for item in obj for each in opaque_objects(item)]
    parts = take_apart(obj)
    return [obj] if parts is None else opaque_objects(parts.items)


def template(
    obj: Any, placeholder: Callable[[torch.Tensor], Any], opaque: Callable[[Any], Any]
) -> Any:
    """Returns ``obj`` as plain data, each tensor replaced by its placeholder.

    Args:
        obj: any structure.
        placeholder: gives what stands for a tensor.
        opaque: gives what stands for an object with state of its own.
    """
    if isinstance(obj, torch.Tensor):
        return placeholder(obj)
    inner = functools.partial(template, placeholder=placeholder, opaque=opaque)
    if type(obj) in _PLAIN_TYPES:
        return _map_plain(obj, inner)
    parts = take_apart(obj)
    if parts is not None:
        skeleton = parts.skeleton
        if parts.is_copied:
            # The skeleton must not keep the captured tensors alive.
            skeleton = parts.build(dict.fromkeys(parts.items))
        return Container(
            skeleton, parts.kind, {key: inner(item) for key, item in parts.items.items()}
        )
    return obj if isinstance(obj, _CONSTANT_TYPES) or _is_of_module(obj) else opaque(obj)


def _is_of_module(obj: Any) -> bool:
    """Whether an object is a method of a module, which is one wherever it is named."""
    return isinstance(obj, types.MethodType) and isinstance(obj.__self__, torch.nn.Module)


def placeholders(obj: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Yields the placeholders of class ``kind``, or of several classes, in a template, in order."""
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


def fill(obj: Any, kind: type | tuple[type, ...], value: Callable[[Any], Any]) -> Any:
    """Builds a structure from a template, each placeholder replaced by its value."""
    if isinstance(obj, kind):
        return value(obj)
    inner = functools.partial(fill, kind=kind, value=value)
    if isinstance(obj, Container):
        return obj.build({key: inner(item) for key, item in obj.items.items()})
    return _map_plain(obj, inner) if type(obj) in _PLAIN_TYPES else obj


def equal(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether two templates are alike; ``same`` compares placeholders and opaque constants."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Container):
        return (
            one.kind == other.kind
            and type(one.skeleton) is type(other.skeleton)
            and equal(one.items, other.items, same)
        )
    if type(one) is dict:
        return one.keys() == other.keys() and all(
            equal(item, other[key], same) for key, item in one.items()
        )
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(
            equal(a, b, same) for a, b in zip(one, other, strict=True)
        )
    if type(one) is slice:
        return equal((one.start, one.stop, one.step), (other.start, other.stop, other.step), same)
    if isinstance(one, float) and one != one:
        return bool(other != other)
    if isinstance(one, _VALUE_TYPES):
        return bool(one == other)
    return same(one, other)


def retemplate(obj: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Returns a template with its placeholders of class ``kind`` replaced by others."""
    if isinstance(obj, kind):
        return function(obj)
    inner = functools.partial(retemplate, kind=kind, function=function)
    if isinstance(obj, Container):
        items = {key: inner(item) for key, item in obj.items.items()}
        return Container(obj.skeleton, obj.kind, items)
    return _map_plain(obj, inner) if type(obj) in _PLAIN_TYPES else obj


def same(want: Any, got: Any, special: Callable[[Any, Any], bool]) -> bool:
    """Whether a structure is what a template stands for.

    Constants must be of one type: 1 is not True, and 0.0 is not -0.0. This runs for every argument
    of every call in every microbatch, so the usual cases come first.

    Args:
        want: the template.
        got: the structure.
        special: compares placeholders, and objects that are not identical.
    """
    if want is got:
        return True
    kind = type(want)
    if kind is Container:
        return _same_container(want, got, special)
    if kind is not type(got):
        return special(want, got)
    if kind is tuple or kind is list:
        if len(want) != len(got):
            return False
        for one, other in zip(want, got, strict=True):
            if one is not other and not same(one, other, special):
                return False
        return True
    if kind is int or kind is str:
        return bool(want == got)
    if kind is float:
        if want != want:
            return bool(got != got)
        return bool(want == got) and math.copysign(1.0, want) == math.copysign(1.0, got)
    if kind is dict:
        return len(want) == len(got) and all(
            type(one) is type(other) and one == other and same(want[one], got[other], special)
            for one, other in zip(want, got, strict=True)
        )
    if kind is slice:
        return same((want.start, want.stop, want.step), (got.start, got.stop, got.step), special)
    if kind is complex:
        return repr(want) == repr(got)
    if issubclass(kind, _VALUE_TYPES):
        return bool(want == got)
    if kind is types.FunctionType:
        return _same_function(want, got, special)
    if kind is types.MethodType and _is_of_module(want):
        return bool(want == got)
    if kind is functools.partial:
        return same(
            (want.func, want.args, want.keywords), (got.func, got.args, got.keywords), special
        )
    return special(want, got)


def _same_container(want: Container, got: Any, special: Callable[[Any, Any], bool]) -> bool:
    parts = take_apart(got)
    if parts is None or parts.kind != want.kind:
        return False
    if not want.is_copied:
        return bool(want.skeleton == parts.skeleton) and same(want.items, parts.items, special)
    return type(want.skeleton) is type(got) and same(want.items, parts.items, special)


def _same_function(want: Any, got: Any, special: Callable[[Any, Any], bool]) -> bool:
    """Whether two functions are made of the same code around the same things."""
    return (
        want.__code__ is got.__code__
        and want.__globals__ is got.__globals__
        and same(
            (want.__defaults__, want.__kwdefaults__),
            (got.__defaults__, got.__kwdefaults__),
            special,
        )
        and all(
            same(one.cell_contents, other.cell_contents, special)
            for one, other in zip(want.__closure__ or (), got.__closure__ or (), strict=True)
        )
    )


def text(obj: Any, placeholder: Callable[[Any], str]) -> str:
    """Returns a template as text that is the same in every process."""
    inner = functools.partial(text, placeholder=placeholder)
    if isinstance(obj, Container):
        return f"{type(obj.skeleton).__name__}{inner(obj.items)}"
    if type(obj) is dict:
        # In the order of the names: code that goes through a set fills a dict in any order.
        return "{" + ", ".join(sorted(f"{key}: {inner(item)}" for key, item in obj.items())) + "}"
    if type(obj) in (list, tuple):
        return "[" + ", ".join(map(inner, obj)) + "]"
    if type(obj) is slice:
        return f"slice{inner((obj.start, obj.stop, obj.step))}"
    if isinstance(obj, torch.device):
        return obj.type  # its index differs between ranks
    if isinstance(obj, _VALUE_TYPES):
        return repr(obj)
    if isinstance(obj, _CONSTANT_TYPES):
        return str(getattr(obj, "__qualname__", type(obj).__name__))
    return placeholder(obj)


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


def value_paths(obj: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields every number and text in a template with the way to reach it."""
    if isinstance(obj, bool | int | float | complex | str) and not isinstance(obj, enum.Enum):
        yield path, obj
    elif isinstance(obj, Container):
        kind = "attribute" if obj.kind == "fields" else "item"
        for key, item in obj.items.items():
            yield from value_paths(item, (*path, (kind, key)))
    elif type(obj) in (tuple, list):
        for index, item in enumerate(obj):
            yield from value_paths(item, (*path, ("item", index)))
    elif type(obj) is dict:
        for key, item in obj.items():
            yield from value_paths(item, (*path, ("item", key)))


def follow(obj: Any, path: Path) -> Any:
    """Returns what stands at ``path`` in a structure."""
    for kind, key in path:
        obj = obj[key] if kind == "item" else getattr(obj, key)
    return obj


def _collect(obj: Any, found: list[torch.Tensor]) -> None:
    """Adds the tensors in a structure to a list."""
    if isinstance(obj, torch.Tensor):
        found.append(obj)
        return
    kind = type(obj)
    if kind in _WITHOUT_PARTS:
        return
    if kind is list or kind is tuple:
        items = obj
    elif kind is dict:
        items = obj.values()
    elif kind is slice:
        items = (obj.start, obj.stop, obj.step)
    else:
        parts = take_apart(obj)
        items = () if parts is None else parts.items.values()
    for item in items:
        _collect(item, found)


def _map_plain(obj: Any, inner: Callable[[Any], Any]) -> Any:
    """Returns a copy of a plain container with ``inner`` applied to what it holds."""
    if type(obj) is dict:
        return {key: inner(item) for key, item in obj.items()}
    if type(obj) is slice:
        return slice(inner(obj.start), inner(obj.stop), inner(obj.step))
    return type(obj)(inner(item) for item in obj)
