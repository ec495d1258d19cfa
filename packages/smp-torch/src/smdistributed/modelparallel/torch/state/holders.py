"""What can be changed in Python, read so that it can be compared and put back.

A ``Holder`` is one such thing and what was in it: a dict, a list, the slots of an object, a class,
a cell, a generator of random numbers. For each kind there is a pair of functions.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import ctypes
import functools
import gc
import io
import operator
import pickle
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.containers import slots_in
from smdistributed.modelparallel.torch.compat.private.modes import past_recording
from smdistributed.modelparallel.torch.state.identities import Identities
from smdistributed.modelparallel.torch.tensors.spec import attributes_shown, show_attributes
from smdistributed.modelparallel.torch.tensors.writes import SMALL, writes_of

MISSING = object()
#: What is the same if it is equal; everything else if it is the same object.
_BY_VALUE = (str, bytes, bool, int, float, complex, set, frozenset, types.NoneType)
_OWN_PACKAGE = __name__.partition(".")[0]
#: What an object written in C may refer to, and what is in it is not its own.
_NOT_LOOKED_INTO = (
    *(type, types.ModuleType, types.FrameType),
    *(types.TracebackType, types.CodeType),
)
#: Memory of other libraries is compared up to that size: files are mapped, too.
_MOST_BYTES = 1 << 20
#: What Python itself leaves in classes, sooner or later.
_KEPT_BY_PYTHON = frozenset(
    {"__slotnames__", "__doc__", "__annotations__", "__annotations_cache__", "_abc_impl"}
)


class Owner(NamedTuple):
    """The attribute of a module by which state is reached."""

    module: nn.Module
    attribute: str


class Kind(NamedTuple):
    """How one kind of thing is read and put back.

    Attributes:
        read: gives its contents, comparable item by item.
        put_back: fills it with former contents; None if that cannot be done.
    """

    read: Callable[[Any], Any]
    put_back: Callable[[Any, Any], None] | None


class Holder(NamedTuple):
    """Something that can be changed, and what was in it.

    Attributes:
        obj: what is changed.
        owner: by which attribute it is reached; None for a class, a global, a closure.
        path: names it.
        read: gives its contents, comparable item by item.
        put_back: fills it with former contents.
        before: its contents.
    """

    obj: Any
    owner: Owner | None
    path: str
    read: Callable[[Any], Any]
    put_back: Callable[[Any, Any], None] | None
    before: Any


def _read_dict(obj: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(obj))


def _refill_dict(obj: dict[Any, Any], items: dict[Any, Any]) -> None:
    own: Any = collections.OrderedDict if isinstance(obj, collections.OrderedDict) else dict
    own.clear(obj)
    for key, item in items.items():
        own.__setitem__(obj, key, item)


def _read_hooks(obj: dict[int, Any]) -> dict[int, Any]:
    """Returns the hooks of others: the library's own come and go by themselves."""
    return {
        key: hook
        for key, hook in obj.items()
        if not (getattr(hook, "__module__", "") or "").startswith(_OWN_PACKAGE)
    }


def _read_shown(obj: dict[str, Any]) -> dict[str, Any]:
    """Returns what a script sees of an object of the library: not the library's own objects."""
    return {key: value for key, value in obj.items() if not is_of_library(value)}


def _refill_shown(obj: dict[str, Any], items: dict[str, Any]) -> None:
    for key in _read_shown(obj).keys() - items.keys():
        del obj[key]
    obj.update(items)


def is_of_library(obj: Any) -> bool:
    """Whether an object is of a class of the library."""
    return module_of(type(obj)).startswith(_OWN_PACKAGE)


def module_of(kind: type) -> str:
    """Returns the name of the module of a class; some that are written in C have none."""
    name: object = kind.__module__
    return name if isinstance(name, str) else "builtins"


def _refill_hooks(obj: dict[int, Any], items: dict[int, Any]) -> None:
    for key in _read_hooks(obj).keys() - items.keys():
        del obj[key]
    for key, hook in items.items():
        obj.setdefault(key, hook)


def refill_list(obj: Any, items: list[Any]) -> None:
    """Fills a list or a deque with items."""
    obj.clear()
    obj.extend(items)


def _refill_set(obj: set[Any], items: set[Any]) -> None:
    obj.clear()
    obj.update(items)


def _refill_array(obj: Any, data: bytes) -> None:
    numpy: Any = sys.modules["numpy"]
    obj[...] = numpy.frombuffer(data, obj.dtype).reshape(obj.shape)


def _array_bytes(obj: Any) -> bytes:
    found: bytes = obj.tobytes()
    return found


def _read_objects(obj: Any) -> list[Any]:
    return list(obj.flat)


def _refill_objects(obj: Any, items: list[Any]) -> None:
    for position, item in enumerate(items):
        obj.flat[position] = item


def _read_torch(obj: torch.Generator) -> bytes:
    with past_recording():
        return obj.get_state().numpy().tobytes()


def _put_torch(obj: torch.Generator, state: bytes) -> None:
    with past_recording():
        obj.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _read_generator(obj: Any) -> Any:
    return repr(obj.bit_generator.state), obj.bit_generator.state


def _put_generator(obj: Any, state: Any) -> None:
    obj.bit_generator.state = state[1]


def _read_older_generator(obj: Any) -> bytes:
    return pickle.dumps(obj.get_state(legacy=False))


def _put_older_generator(obj: Any, state: bytes) -> None:
    obj.set_state(pickle.loads(state))


def _get_state(obj: random.Random) -> Any:
    return obj.getstate()


def _set_state(obj: random.Random, state: Any) -> None:
    obj.setstate(state)


def _where_generator_is(obj: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = obj.gi_frame
    return None if frame is None else (frame.f_lasti, dict(frame.f_locals))


def _read_pickled(obj: Any) -> Any:
    """Returns what pickling would keep of an object that is not written in Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of iterators, since Python 3.12
            return _comparable(obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
    except Exception:  # whatever says that it cannot be pickled
        return None


def _comparable(part: Any) -> Any:
    """Returns what stands for a part of a pickle: values, positions of iterators, identities."""
    if isinstance(part, tuple):
        return tuple(map(_comparable, part))
    if isinstance(part, types.GeneratorType):
        return _where_generator_is(part)
    if hasattr(type(part), "__next__"):
        return _read_pickled(part)
    return part if isinstance(part, _BY_VALUE) else [part]


def _says_how_it_is_pickled(kind: type) -> bool:
    """Whether a class of Python's own, written in C, says how its instances are pickled.

    Then that is all of their state. What says it elsewhere may run code for long, or not at all.
    """
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        says = next((base for base in kind.__mro__ if name in vars(base)), object)
        if says is not object and not isinstance(vars(says)[name], types.FunctionType):
            return says.__module__.partition(".")[0] in sys.stdlib_module_names
    return False


def is_closed(kind: type) -> bool:
    """Whether instances have state that is no attribute: more memory than attributes take."""
    num_slots = sum(1 for _ in slots_in(kind))
    # Offsets of what lies before an object are negative.
    num_fields = num_slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    size = object.__basicsize__ + num_fields * ctypes.sizeof(ctypes.c_void_p)
    return kind.__basicsize__ > size or kind.__itemsize__ > 0


def objects_in_closed(obj: Any) -> list[Any]:
    """Returns the objects that one refers to whose class is written in C, but for its class."""
    own = getattr(obj, "__dict__", None)
    return [
        each
        for each in gc.get_referents(obj)
        if each is not own and not isinstance(each, _NOT_LOOKED_INTO)
    ]


def _read_closed(obj: Any) -> tuple[Any, ...]:
    """Returns what shows of an object whose class is written in C, if it changes."""
    kind = type(obj)
    moves = hasattr(kind, "__next__") and not isinstance(kind.__next__, types.FunctionType)
    pickled = _read_pickled(obj) if moves or _says_how_it_is_pickled(kind) else None
    return pickled, _read_buffer(obj), objects_in_closed(obj)


def _read_buffer(obj: Any) -> bytes:
    """Returns the memory that an object shows; of much memory nothing."""
    try:
        with memoryview(obj) as view:
            return view.tobytes() if view.nbytes <= _MOST_BYTES else b""
    except (TypeError, ValueError, BufferError):  # it shows none, or is closed
        return b""


def _position(obj: io.IOBase) -> int | None:
    try:
        return obj.tell() if obj.readable() and obj.seekable() else None
    except (OSError, ValueError):  # it is closed, or being read line by line
        return None


def _put_position(obj: io.IOBase, position: int | None) -> None:
    if position is not None:
        obj.seek(position)


def _read_slots(obj: Any) -> dict[Any, Any]:
    found = {}
    for slot in slots_in(type(obj)):
        with contextlib.suppress(AttributeError):  # it is empty
            found[slot] = slot.__get__(obj)
    return found


def _refill_slots(obj: Any, items: dict[Any, Any]) -> None:
    for slot in _read_slots(obj).keys() - items.keys():
        slot.__delete__(obj)
    for slot, value in items.items():
        slot.__set__(obj, value)


#: The flag ``Py_TPFLAGS_IMMUTABLETYPE`` of a class, such as those that extensions write in C.
_IMMUTABLE = 1 << 8


def can_change(kind: type) -> bool:
    """Whether anything can be set on a class."""
    return not kind.__flags__ & _IMMUTABLE


#: What classes have elsewhere than in their namespace.
_OF_CLASSES = ("__name__", "__qualname__", "__bases__")


def _read_class(kind: type) -> dict[str, Any]:
    found = {key: value for key, value in vars(kind).items() if key not in _KEPT_BY_PYTHON}
    return found | {name: getattr(kind, name) for name in _OF_CLASSES}


def _refill_class(kind: type, items: dict[str, Any]) -> None:
    for key in _read_class(kind).keys() - items.keys():
        type.__delattr__(kind, key)
    now = _read_class(kind)
    for key, value in items.items():
        if now.get(key, MISSING) is not value:
            type.__setattr__(kind, key, value)


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _refill_cell(cell: types.CellType, value: Any) -> None:
    if value is not MISSING:
        cell.cell_contents = value


_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__name__")


def _read_function(function: types.FunctionType) -> tuple[Any, ...]:
    return tuple(getattr(function, name) for name in _OF_FUNCTIONS)


def _refill_function(function: types.FunctionType, parts: tuple[Any, ...]) -> None:
    for name, part in zip(_OF_FUNCTIONS, parts, strict=True):
        setattr(function, name, part)


def _read_variable(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(MISSING)


def _put_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    if value is not MISSING:
        variable.set(value)


def _read_tensor(tensor: torch.Tensor) -> tuple[tuple[int, int, int], bytes]:
    """Returns what shows that it was written to; of a small one on the host its content as well."""
    content = b""
    is_here = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if is_here and tensor.numel() <= SMALL and tensor.untyped_storage().size():
        with past_recording(), torch.no_grad():
            # Other libraries, which write to its memory, are seen by nobody.
            content = tensor.detach().clone().flatten().view(torch.uint8).numpy().tobytes()
    return writes_of(tensor), content


def _refill_tensor(tensor: torch.Tensor, before: tuple[tuple[int, int, int], bytes]) -> None:
    """Undoes what other libraries wrote; operations of torch have written nothing yet."""
    if before[1] and _read_tensor(tensor)[1] != before[1]:
        with past_recording(), torch.no_grad():
            content = torch.frombuffer(bytearray(before[1]), dtype=tensor.dtype)
            tensor.detach().copy_(content.view(tensor.shape))


def put_entries(entries: dict[str, Any], items: dict[str, Any]) -> None:
    """Puts some names of a namespace back."""
    entries.update(items)


def entries(names: tuple[str, ...]) -> Kind:
    """Returns how some names of a namespace are read and put back."""
    return Kind(
        lambda namespace: {name: namespace.get(name, MISSING) for name in names}, put_entries
    )


def names(among: frozenset[str]) -> Kind:
    """Returns how it is read and put back which names a namespace has, of those that count.

    Modules do not: they come into a package when something imports them.
    """

    def read(namespace: dict[str, Any]) -> frozenset[str]:
        found = among & namespace.keys()
        return frozenset(e for e in found if not isinstance(namespace[e], types.ModuleType))

    return Kind(read, functools.partial(_remove_names, read))


def _public_names(namespace: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name in namespace if not name.startswith("__"))


def _remove_names(
    read: Callable[[dict[str, Any]], frozenset[str]],
    namespace: dict[str, Any],
    before: frozenset[str],
) -> None:
    for name in read(namespace) - before:
        del namespace[name]


def same(before: Any, now: Any) -> bool:
    """Whether contents are the same objects, in the same places."""
    if before is now:
        return True
    if isinstance(before, dict) and isinstance(now, dict):
        return (
            len(before) == len(now)
            and all(map(operator.is_, before.values(), now.values()))
            and all(map(operator.eq, before, now))
        )
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(operator.is_, before, now))
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(map(same, before, now))
    return isinstance(before, _BY_VALUE) and type(before) is type(now) and bool(before == now)


def in_one_go(held: Iterable[Holder]) -> tuple[Identities, list[Holder]]:
    """Returns what is in most holders, to be compared in one go, and the other holders.

    They have just been found to be as they were.
    """
    mappings: list[Any] = []
    sequences: list[Any] = []
    attributes: list[tuple[Any, str]] = []
    names: list[tuple[Any, str]] = []
    sized: list[dict[str, Any]] = []
    others = []
    for holder in held:
        obj, before = holder.obj, holder.before
        if holder.read is DICT.read:
            mappings.append(obj)
        elif holder.read is ON_TENSOR.read:
            (mappings if before else sized).append(vars(obj))
        elif holder.read is CLASS.read:
            mappings.append(vars(obj))
            attributes += [(obj, name) for name in _OF_CLASSES]
        elif holder.read is LIST.read:
            sequences.append(obj)
        elif holder.read is FUNCTION.read:
            attributes += [(obj, name) for name in _OF_FUNCTIONS]
        elif holder.read is CELL.read and before is not MISSING:
            attributes.append((obj, "cell_contents"))
        elif holder.put_back is put_entries and all(
            each is not MISSING for each in before.values()
        ):
            names += [(obj, name) for name in before]
        else:
            others.append(holder)
    return Identities(mappings, sequences, attributes, names, sized), others


FACTORY = Kind(
    lambda obj: {"default_factory": obj.default_factory},
    lambda obj, before: setattr(obj, "default_factory", before["default_factory"]),
)
DICT = Kind(_read_dict, _refill_dict)
#: What a script has put on a tensor, or on a fake as on the parameter that it stands for.
ON_TENSOR = Kind(attributes_shown, show_attributes)
#: The attributes of an object of the library.
SHOWN = Kind(_read_shown, _refill_shown)
#: Which names a namespace has, but for those that Python itself puts there.
PUBLIC_NAMES = Kind(_public_names, functools.partial(_remove_names, _public_names))
#: Of a module.
HOOKS = Kind(_read_hooks, _refill_hooks)
#: Deques too.
LIST = Kind(list, refill_list)
SET = Kind(set, _refill_set)
TENSOR = Kind(_read_tensor, _refill_tensor)
ARRAY = Kind(_array_bytes, _refill_array)
#: An array of objects.
OBJECTS = Kind(_read_objects, _refill_objects)
#: Of ``contextvars``.
VARIABLE = Kind(_read_variable, _put_variable)
TORCH_GENERATOR = Kind(_read_torch, _put_torch)
NUMPY_GENERATOR = Kind(_read_generator, _put_generator)
#: A ``RandomState`` of NumPy's.
OLDER_NUMPY_GENERATOR = Kind(_read_older_generator, _put_older_generator)
#: Of Python's module of that name.
RANDOM = Kind(_get_state, _set_state)
GENERATOR = Kind(_where_generator_is, None)
#: Of an object that is not written in Python: an iterator, a queue, mapped memory, an exception.
CLOSED = Kind(_read_closed, None)
#: Where a file is read.
STREAM = Kind(_position, _put_position)
SLOTS = Kind(_read_slots, _refill_slots)
CLASS = Kind(_read_class, _refill_class)
CELL = Kind(_read_cell, _refill_cell)
FUNCTION = Kind(_read_function, _refill_function)
