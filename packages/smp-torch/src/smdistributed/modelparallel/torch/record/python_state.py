"""The Python state that a recording depends on.

A recorded step replays tensor operations; everything else that Python did happened once, while it
was recorded. So a replay is right only while the Python state that the recorded code read is what
it was. ``StateWatch`` follows the recording call by call, and notes for every function that runs
between modules the attributes, globals, closure values and defaults that its code names, with the
values that they had when the function was entered. Later ``changed`` compares them, in some ten
nanoseconds each.

What is followed: plain objects (a model, its configuration, the user's own arguments),
containers, classes, functions, and modules of Python outside PyTorch and the standard library. What
no watch can see: the clock, files, the environment, state behind objects written in C. Random
generators are compared as a whole.

The file is long because one object does it all: what is followed, how it is copied, compared and
put back must agree for each kind of state.
"""

from __future__ import annotations

import dis
import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.record import interception
from smdistributed.modelparallel.torch.record.nested import is_plain_value

_MISSING = object()
#: The slots of classes seen; a class lives no longer for it, nor the models that it may hold.
_SLOTS: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_OWN_FOLDER = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = str(Path(functools.__file__).parent) + "/"
#: Slots of a module that hold tensors and children; the structure of the model is watched apart.
_MODULE_TENSORS = frozenset({"_parameters", "_buffers", "_modules", "training"})


class _Names(NamedTuple):
    """What a piece of code names.

    Attributes:
        read: attributes and globals.
        stored: attributes that it sets; also among ``read``.
        probed: attributes that need not be there yet: those that it sets, and texts that may be
            given to ``hasattr`` or ``getattr``; also among ``read``.
    """

    read: frozenset[str]
    stored: frozenset[str]
    probed: frozenset[str]


class _Holder:
    """Some entries of one dict with the values that they had."""

    __slots__ = ("describe", "entries", "expected")

    def __init__(self, entries: Mapping[str, Any], describe: str) -> None:
        self.entries = entries
        self.expected: dict[Any, Any] = {}
        self.describe = describe

    def changes(self) -> Iterator[str]:
        get = self.entries.get
        for key, value in self.expected.items():
            found = get(key, _MISSING)
            if found is not value and not _same(found, value):
                yield f"{self.describe}{_key_text(key)}"


class StateWatch:
    """Collects what recorded code reads; afterwards tells whether it still has its value.

    Args:
        whole: objects all of whose attributes count, named or not: the split modules, whose code
            may compute the names it reads.
    """

    def __init__(self, whole: Iterable[object]) -> None:
        self._whole = {id(each) for each in whole}
        self._holders: dict[int, _Holder] = {}
        self._stored: set[tuple[int, str]] = set()
        self._cells: dict[int, tuple[types.CellType, Any, str]] = {}
        self._containers: dict[int, tuple[Any, Any, str]] = {}
        self._random: list[tuple[str, Any, Any, Any]] = []
        self._walked: set[tuple[int, int]] = set()
        self._seen_calls: set[tuple[object, ...]] = set()
        self._known: set[int] = set()
        # Identities are only good while the objects live.
        self._alive: list[Any] = []
        self._former_profile: Any = None

    # ------------------------------------------------------------------ collecting

    def begin(self, function: Any, arguments: Any) -> None:
        """Starts following calls in this thread: of the user's function, first of all."""
        self._former_profile = sys.getprofile()
        self._random = [(name, state(), state, put) for name, state, put in _generators()]
        names = _names_of(_code_of(function))
        self._walk(function, names, getattr(function, "__qualname__", "the step function"))
        self._walk(arguments, names, "an argument of the step function")
        self.resume()

    def keep(self, container: Any, path: str) -> None:
        """Takes note of a container that PyTorch's own code reads and changes."""
        self._containers.setdefault(id(container), (container, _copy(container), path))

    def resume(self) -> None:
        """Follows calls again after ``pause``."""
        sys.setprofile(self._on_event)

    @staticmethod
    def pause() -> None:
        """Stops following calls, while a module runs as a whole."""
        sys.setprofile(None)

    def _on_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        names = _watched_names(code)
        if names is None:
            return
        values = {
            name: value
            for name, value in frame.f_locals.items()
            if isinstance(value, nn.Module | type) or id(value) in self._known
        }
        call = (code, *map(id, values.values()))
        if call in self._seen_calls:
            return
        self._seen_calls.add(call)
        self._alive.extend(values.values())
        self._walk_globals(frame.f_globals, code, names)
        for name, value in values.items():
            self._walk(value, names, name)
            # Closures and defaults of a method; those of functions come with what names them.
            method = getattr(type(value), code.co_name, None)
            if isinstance(method, types.FunctionType):
                self._walk(method, names, method.__qualname__)

    def _walk_globals(self, namespace: dict[str, Any], code: types.CodeType, names: _Names) -> None:
        for name in _globals_in(code):
            if name in namespace:
                self._expect(namespace, name, f"{namespace.get('__name__', 'global')}.")
                self._walk(namespace[name], names, name)

    def _expect(self, entries: Mapping[str, Any], key: Any, describe: str) -> None:
        value = entries.get(key, _MISSING)
        if getattr(value, "__module__", "") == interception.__name__:
            return  # put there for the time of the recording
        holder = self._holders.get(id(entries))
        if holder is None:
            holder = self._holders[id(entries)] = _Holder(entries, describe)
        holder.expected.setdefault(key, value)

    def _walk(self, value: Any, names: _Names, path: str) -> None:
        """Notes what code that names ``names`` can read in ``value``."""
        if isinstance(value, torch.Tensor) or is_plain_value(value):
            return
        key = (id(value), id(names))
        if key in self._walked:
            return
        self._walked.add(key)
        self._alive += (value, names)
        self._known.add(id(value))
        if isinstance(value, types.FunctionType):
            self._walk_function(value, names, path)
        elif isinstance(value, types.MethodType):
            self._walk(value.__func__, names, path)
            self._walk(value.__self__, names, type(value.__self__).__name__)
        elif isinstance(value, functools.partial):
            self._walk((value.func, value.args, value.keywords), names, path)
        elif isinstance(value, types.ModuleType):
            if not _is_foreign(getattr(value, "__file__", "<console>")):
                self._walk_entries(vars(value), names.read & vars(value).keys(), names, path)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._walk_container(value, names, path)
        elif isinstance(value, type):
            self._walk_class(value, names)
        else:
            self._walk_object(value, names, path)

    def _walk_function(self, function: types.FunctionType, names: _Names, path: str) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._cells.setdefault(id(cell), (cell, content, f"{name} in {path}"))
            self._walk(content, names, name)
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                self._walk(defaults, names, f"a default of {path}")
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is not None:
            self._walk(wrapped, names, path)

    def _walk_container(self, value: Any, names: _Names, path: str) -> None:
        if not isinstance(value, tuple | frozenset):
            self._containers.setdefault(id(value), (value, _copy(value), path))
        for item in list(_items_of(value)):
            self._walk(item, names, path)

    def _walk_class(self, value: type, names: _Names) -> None:
        for base in value.__mro__:
            if base is object or _is_foreign_module(base.__module__):
                continue
            for name in names.read & base.__dict__.keys():
                if is_plain_value(base.__dict__[name]):
                    self._expect(base.__dict__, name, f"{base.__qualname__}.")

    def _walk_object(self, value: Any, names: _Names, path: str) -> None:
        self._walk_class(type(value), names)
        entries = getattr(value, "__dict__", None)
        if entries is not None:
            self._stored.update((id(entries), name) for name in names.stored)
            if isinstance(value, nn.Module):
                path = type(value).__name__
            chosen = entries.keys() if id(value) in self._whole else names.read & entries.keys()
            self._walk_entries(entries, chosen - _MODULE_TENSORS, names, path)
            for name in names.read - entries.keys():
                # An attribute that appears later hides one of the class, or answers `hasattr`.
                of_class = getattr(type(value), name, _MISSING)
                if is_plain_value(of_class) or (of_class is _MISSING and name in names.probed):
                    self._expect(entries, name, f"{path}.")
        if isinstance(value, nn.Module):
            # None yet in a module under construction.
            children = value.__dict__.get("_modules", {})
            for name in names.read & children.keys():
                self._walk(children[name], names, name)
            if isinstance(value, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                for child in children.values():
                    self._walk(child, names, path)
        for name in names.read & _slots_of(type(value)):
            self._walk(getattr(value, name, None), names, f"{path}.{name}")

    def _walk_entries(
        self, entries: Mapping[str, Any], chosen: Iterable[str], names: _Names, path: str
    ) -> None:
        for name in list(chosen):
            self._expect(entries, name, f"{path}.")
            self._walk(entries[name], names, f"{path}.{name}")

    # ------------------------------------------------------------------ comparing

    def end(self) -> None:
        """Stops following calls; what only served that is dropped."""
        former = self._former_profile
        if hasattr(former, "enable"):
            former.enable()  # the standard library's profiler is no function
        else:
            sys.setprofile(former)
        self._walked.clear()
        self._seen_calls.clear()
        self._known.clear()
        self._alive.clear()

    def changed(self) -> str | None:
        """Returns the name of something that no longer has its value, or None."""
        return next(self.changes(), None)

    def changes(self) -> Iterator[str]:
        """Yields the name of everything that no longer has its value."""
        for holder in self._holders.values():
            yield from holder.changes()
        for cell, value, path in self._cells.values():
            try:
                found = cell.cell_contents
            except ValueError:
                found = _MISSING
            if found is not value and not _same(found, value):
                yield path
        for container, items, path in self._containers.values():
            if not _same_items(container, items):
                yield path

    def changed_entries(self) -> dict[tuple[int, Any], tuple[str, Any]]:
        """Returns the attributes and globals that no longer have their values.

        Returns:
            for each its name for messages and what it is now.
        """
        found = {}
        for holder in self._holders.values():
            for key, value in holder.expected.items():
                now = holder.entries.get(key, _MISSING)
                if not _same(now, value):
                    name = f"{holder.describe}{_key_text(key)}"
                    found[id(holder.entries), key] = name, now
        return found

    def minds(self, entry: tuple[int, Any], now: Any) -> bool:
        """Whether what others change matters here: it is set here, or read and no tensor.

        A tensor that is read comes from where it was made.
        """
        holder = self._holders.get(entry[0])
        if holder is None or entry[1] not in holder.expected:
            return False
        return entry in self._stored or not isinstance(now, torch.Tensor)

    def restore(self) -> None:
        """Gives everything but random generators the value back that it had."""
        for holder in self._holders.values():
            if isinstance(holder.entries, dict):
                for key, value in holder.expected.items():
                    if value is _MISSING:
                        holder.entries.pop(key, None)
                    elif holder.entries.get(key) is not value:
                        holder.entries[key] = value
        for cell, value, _ in self._cells.values():
            cell.cell_contents = value
        for container, items, _ in self._containers.values():
            if not _same_items(container, items):
                _refill(container, items)

    def restore_random(self) -> None:
        """Puts the random generators of Python and NumPy back."""
        for _, before, _, put_back in self._random:
            put_back(before)

    def random_consumed(self) -> str | None:
        """Returns the name of a random generator that the run has drawn from, or None.

        Valid right after the run: between steps others draw from them too.
        """
        for name, before, state, _ in self._random:
            if not _same_random(before, state()):
                return name
        return None

    def stray_tensors(self, kind: type) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yields the tensors of a class that the run left behind in watched places.

        Yields:
            what to call the place, the container, the key in it, the tensor.
        """
        for holder in self._holders.values():
            for key in holder.expected:
                found = holder.entries.get(key)
                if isinstance(found, kind):
                    yield f"{holder.describe}{_key_text(key)}", holder.entries, key, found
        for container, _, path in self._containers.values():
            items = dict.items(container) if isinstance(container, dict) else enumerate(container)
            for key, item in list(items):
                if isinstance(item, kind):
                    yield path, container, key, item
        for cell, _, path in self._cells.values():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if isinstance(content, kind):
                yield path, {}, "", content


def python_draws() -> Callable[[], bool]:
    """Returns a function that says whether Python's or NumPy's generator was drawn from since."""
    before = [(state(), state) for _, state, _ in _generators()]
    return lambda: not all(_same_random(former, state()) for former, state in before)


def _key_text(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


def _same(found: Any, value: Any) -> bool:
    """Whether two plain values, or containers of such, are equal."""
    if found is value:
        return True
    if type(found) is not type(value):
        return False
    if is_plain_value(value):
        return bool(found == value)
    if isinstance(value, list | tuple | dict | set | frozenset | deque):
        return _same_items(found, value)
    if isinstance(value, types.MethodType):
        return found.__func__ is value.__func__ and found.__self__ is value.__self__
    return type(value).__module__ == "numpy" and bool((found == value).all())


def _same_items(found: Any, value: Any) -> bool:
    if len(found) != len(value):
        return False
    if isinstance(value, set | frozenset):
        return bool(found == value)
    if isinstance(value, dict) and (
        not all(map(operator.is_, dict.keys(found), value)) and dict.keys(found) != value.keys()
    ):
        return False
    found, value = _items_of(found), _items_of(value)
    return all(map(operator.is_, found, value)) or all(map(_same, found, value))


def _items_of(container: Any) -> Iterable[Any]:
    # The class's own access may compute something: go past it.
    return dict.values(container) if isinstance(container, dict) else container


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, dict):
        own = OrderedDict if isinstance(container, OrderedDict) else dict
        own.clear(container)
        for key, item in items.items():
            own.__setitem__(container, key, item)
    elif isinstance(container, set):
        container.clear()
        container.update(items)
    else:
        container.clear()
        container.extend(items)


def _copy(value: Any) -> Any:
    return dict(dict.items(value)) if isinstance(value, dict) else value.copy()


def _generators() -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = [("Python's random", random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append(("NumPy's random", numpy.random.get_state, numpy.random.set_state))
    return found


def _same_random(before: Any, now: Any) -> bool:
    return all(
        bool(getattr(one == other, "all", lambda equal=one == other: equal)())
        for one, other in zip(before, now, strict=True)
    )


def _is_foreign(file: str | None) -> bool:
    """Whether code is PyTorch's, the standard library's or ours: it reads no state of the user."""
    if file is None:
        return True
    if "site-packages" not in file and file.startswith(_STANDARD_LIBRARY):
        return True
    return file.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<frozen", "<segment"))


@functools.cache
def _is_foreign_module(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and _is_foreign(getattr(module, "__file__", "<console>"))


@functools.cache
def _watched_names(code: types.CodeType) -> _Names | None:
    """Returns what code names, or None for code that is not watched."""
    return None if _is_foreign(code.co_filename) else _names_of(code)


@functools.cache
def _names_of(code: types.CodeType | None) -> _Names:
    if code is None:
        return _Names(frozenset(), frozenset(), frozenset())
    inner = [_names_of(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    texts = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    stores = (each for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    stored = {each.argval for each in stores}.union(*(each.stored for each in inner))
    probed = texts.union(stored, *(each.probed for each in inner))
    read = probed.union(code.co_names, code.co_freevars, *(each.read for each in inner))
    return _Names(frozenset(read), frozenset(stored), frozenset(probed))


@functools.cache
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    found = {each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_globals_in(constant))
    return tuple(sorted(found))


def _slots_of(kind: type) -> frozenset[str]:
    found = _SLOTS.get(kind)
    if found is None:
        slots: set[str] = set()
        for base in kind.__mro__:
            named: str | Sequence[str] = base.__dict__.get("__slots__", ())
            slots.update([named] if isinstance(named, str) else named)
        found = _SLOTS[kind] = frozenset(slots)
    return found


def _code_of(function: Any) -> types.CodeType | None:
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    return getattr(function, "__code__", None)
