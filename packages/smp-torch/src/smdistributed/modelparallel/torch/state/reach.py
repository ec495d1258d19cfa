"""What Python reaches from modules and code: attributes, containers, classes, globals, closures.

Code reaches what it names; where it makes names up it may reach everything of the modules of Python
that it knows.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import gc
import io
import logging
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.state import holders
from smdistributed.modelparallel.torch.state.caches import results_in
from smdistributed.modelparallel.torch.state.holders import MISSING, Holder, Owner
from smdistributed.modelparallel.torch.state.made_up_names import MadeUp, made_up_in
from smdistributed.modelparallel.torch.tensors.nested import is_plain_value
from smdistributed.modelparallel.torch.tensors.spec import attributes_shown

_ATOMS = (torch.dtype, logging.Handler)
#: Constants of classes whose instances have no attributes.
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), type(...), range})
#: What is looked into by its items; one of a class of its own may have attributes besides.
_CONTAINERS = (dict, list, set, tuple, frozenset, collections.deque, functools.partial)
#: What shows another object and has nothing itself.
_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_CODE = (types.FunctionType, types.MethodType, functools.partial)
#: Methods of objects that are not written in Python, and functions of modules.
_BUILT_IN = (types.BuiltinFunctionType, types.MethodWrapperType)
#: Attributes that every module has.
OF_MODULES = frozenset(vars(nn.Module()))
#: What others do when a module is called: it belongs to them, not to the module.
_HOOKS = frozenset(name for name in OF_MODULES if "_hooks" in name)
_OWN_PACKAGE = __name__.partition(".")[0]
#: What is looked into by itself; a class that is made of it may have code and state of its own.
_SUBCLASSED = (dict, list, tuple, set, frozenset, collections.deque, functools.partial)


class Reach:
    """Walks over everything that can be reached, once.

    Args:
        modules: they, and their code.
        code: other functions.
        apart_from: what is not looked into.
        moved: identities of tensors that the library itself moves, and that do not count.

    Attributes:
        holders: what can change of it, as it is now.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        code: Iterable[Callable[..., Any]],
        apart_from: Iterable[object],
        moved: Container[int],
    ) -> None:
        self.holders: list[Holder] = []
        self._seen = set(map(id, apart_from))
        self._classes: set[type] = set()
        self._namespaces: set[tuple[int, frozenset[str]]] = set()
        #: Those of all code, what it makes names of up, and the namespaces of which it does.
        self._names: set[str] = set()
        self._made_up = MadeUp()
        self._whole: dict[int, tuple[dict[str, Any], str]] = {}
        #: Modules of Python that code names, which names others in it, and what else leads to.
        self._named_modules: dict[tuple[types.ModuleType, frozenset[str]], None] = {}
        self._python_modules: dict[types.ModuleType, None] = {}
        self._optimizers: list[tuple[torch.optim.Optimizer, str]] = []
        self._pending: collections.deque[tuple[Any, Owner | None, str]] = collections.deque()
        self._modules = dict.fromkeys(modules)
        self._moved = moved
        for module in self._modules:
            self._seen.add(id(module))
            self._module(module)
        self._walk()
        for kind in dict.fromkeys(type(module) for module in self._modules):
            self._class(kind)
        for module in self._modules:
            self._pending.append((vars(module).get("forward"), None, "forward"))
        for function in code:
            self._pending.append((function, None, getattr(function, "__name__", "a function")))
        self._walk()
        self._walk_what_is_named()

    def _hold(self, kind: holders.Kind, obj: Any, owner: Owner | None, path: str) -> None:
        self.holders.append(Holder(obj, owner, path, *kind, kind.read(obj)))

    def _module(self, module: nn.Module) -> None:
        name = type(module).__name__
        self._hold(_attributes_of(module), vars(module), Owner(module, ""), name)
        for key, value in list(vars(module).items()):
            if key in _HOOKS:
                if key in ("_forward_hooks", "_forward_pre_hooks"):
                    self._hold(holders.HOOKS, value, Owner(module, key), f"{name}.{key}")
                self._pending += [(hook, None, f"{name}.{key}") for hook in value.values()]
            else:
                self._pending.append((value, Owner(module, key), f"{name}.{key}"))

    def _walk(self) -> None:
        while self._pending:
            obj, owner, path = self._pending.popleft()
            # Most of what is met: this runs for each call of a module that is recorded.
            if type(obj) in _PLAIN or id(obj) in self._seen:
                continue
            if isinstance(obj, enum.Enum):
                obj = vars(obj)
            elif type(obj) in weakref.ProxyTypes:
                obj = _behind(obj)
            elif isinstance(obj, types.ModuleType):
                if is_users(obj.__name__):
                    self._python_modules[obj] = None
                continue
            elif obj is sys.modules:
                continue
            has_attributes = isinstance(getattr(obj, "__dict__", None), dict)
            if isinstance(obj, _ATOMS) or (is_plain_value(obj) and not has_attributes):
                continue
            if id(obj) in self._seen:  # what stood before another
                continue
            is_shown = isinstance(obj, nn.Module | torch.optim.Optimizer)
            if holders.is_of_library(obj) and not is_shown:
                continue
            self._seen.add(id(obj))
            self._look(obj, owner, path)
            if has_attributes and isinstance(obj, _CONTAINERS):
                self._attributes(obj, owner, path)
            if isinstance(obj, _SUBCLASSED) and type(obj) not in _SUBCLASSED:
                self._class(type(obj))

    def _walk_what_is_named(self) -> None:
        """Takes what is watched only if code names it, which may lead to more code."""
        known: object = None
        while known != (known := self._known_names()):
            for module in list(self._python_modules):
                self._entries(vars(module), frozenset(self._names), module.__name__)
            if self._made_up.attributes:
                named = [module for module, _ in self._named_modules]
                for module in (*named, *self._python_modules):
                    self._whole[id(vars(module))] = vars(module), module.__name__
            for namespace, path in list(self._whole.values()):
                self._entries(namespace, holders.PUBLIC_NAMES.read(namespace), path)
            if self._made_up.attributes or self._names & {"state", "state_dict"}:
                states = ((each.state, None, f"{path}.state") for each, path in self._optimizers)
                self._pending += states
            self._walk()
        for module in self._python_modules:
            among = holders.names(frozenset(self._names))
            self._hold(among, vars(module), None, module.__name__)
        for namespace, path in self._whole.values():
            self._hold(holders.PUBLIC_NAMES, namespace, None, path)

    def _known_names(self) -> object:
        spaces = len(self._named_modules), len(self._python_modules), len(self._whole)
        return len(self._names), self._made_up, len(self._optimizers), spaces

    def _look(self, obj: Any, owner: Owner | None, path: str) -> None:
        add = self._pending.append
        if isinstance(obj, dict):
            self._hold(holders.DICT, obj, owner, path)
            for value in list(dict.values(obj)):
                add((value, owner, path))
            if isinstance(obj, collections.defaultdict):
                self._hold(holders.FACTORY, obj, owner, path)
                add((obj.default_factory, owner, path))
        elif isinstance(obj, list | collections.deque):
            self._hold(holders.LIST, obj, owner, path)
            for value in list(obj):
                add((value, owner, path))
        elif isinstance(obj, set):
            self._hold(holders.SET, obj, owner, path)
            for value in list(obj):
                add((value, owner, path))
        elif isinstance(obj, tuple | frozenset):
            for value in obj:
                add((value, owner, path))
        elif isinstance(obj, types.FunctionType):
            self._function(obj, owner, path)
        elif isinstance(obj, types.MethodType):
            add((obj.__func__, owner, path))
            add((obj.__self__, owner, path))
        elif isinstance(obj, _BUILT_IN):
            add((obj.__self__, owner, path))
        elif isinstance(obj, _VIEWS):
            self._pending += [(shown, owner, path) for shown in gc.get_referents(obj)]
        elif isinstance(obj, torch.Tensor):
            self._hold(holders.ON_TENSOR, obj, owner, path)
            self._pending += [
                (value, owner, f"{path}.{name}") for name, value in attributes_shown(obj).items()
            ]
            if not isinstance(obj, FakeTensor) and id(obj) not in self._moved:
                self._hold(holders.TENSOR, obj, owner, path)
        elif isinstance(obj, weakref.ref):
            add((obj(), owner, path))
        elif isinstance(obj, functools.partial):
            add(((obj.func, obj.args, obj.keywords), owner, path))
        elif isinstance(obj, contextvars.ContextVar):
            self._hold(holders.VARIABLE, obj, owner, path)
        elif isinstance(obj, logging.Logger):
            self._hold(holders.DICT, vars(obj), owner, path)
        elif isinstance(obj, torch.Generator):
            self._hold(holders.TORCH_GENERATOR, obj, owner, path)
        elif isinstance(obj, random.Random):
            self._hold(holders.RANDOM, obj, owner, path)
        elif isinstance(obj, type):
            self._class(obj)
        elif isinstance(obj, nn.Module):
            if obj not in self._modules:
                self._module(obj)
                self._class(type(obj))
        elif isinstance(obj, torch.optim.Optimizer):
            self._optimizer(obj, owner, path)
            self._class(type(obj))
        elif isinstance(obj, operator.attrgetter | operator.methodcaller):
            self._made_up |= MadeUp(attributes=True)
        elif isinstance(obj, types.GeneratorType):
            self._hold(holders.GENERATOR, obj, owner, path)
        elif holders.module_of(type(obj)).partition(".")[0] == "numpy":
            self._numpy(obj, owner, path)
        elif isinstance(obj, io.IOBase) and not isinstance(obj, io.StringIO | io.BytesIO):
            self._hold(holders.STREAM, obj, owner, path)
        elif isinstance(obj, memoryview):
            add((obj.obj, owner, path))
        else:
            if isinstance(obj, functools._lru_cache_wrapper):
                self._pending += [(each, owner, path) for each in results_in(obj)]
            elif holders.is_closed(type(obj)) and not isinstance(obj, threading.local):
                # But for what shows all that it has in attributes, those of this thread.
                self._hold(holders.CLOSED, obj, owner, path)
                self._pending += [(each, owner, path) for each in holders.objects_in_closed(obj)]
            self._attributes(obj, owner, path)
            self._class(type(obj))

    def _optimizer(self, optimizer: torch.optim.Optimizer, owner: Owner | None, path: str) -> None:
        """Takes an optimizer but for its state, which every update changes."""
        self._optimizers.append((optimizer, path))
        self._hold(_attributes_of(optimizer), vars(optimizer), owner, path)
        self._pending += [
            (value, owner, f"{path}.{key}")
            for key, value in vars(optimizer).items()
            if key != "state"
        ]

    def _attributes(self, obj: Any, owner: Owner | None, path: str) -> None:
        entries = getattr(obj, "__dict__", None)
        if isinstance(entries, dict):
            self._hold(holders.DICT, entries, owner, path)
            for key, value in list(entries.items()):
                self._pending.append((value, owner, f"{path}.{key}"))
        slots = holders.SLOTS.read(obj)
        if slots:
            self._hold(holders.SLOTS, obj, owner, path)
            for slot, value in slots.items():
                self._pending.append((value, owner, f"{path}.{slot.__name__}"))

    def _numpy(self, obj: Any, owner: Owner | None, path: str) -> None:
        flags = getattr(obj, "flags", None)
        if hasattr(obj, "tobytes") and flags is not None and flags.writeable:
            if obj.dtype.hasobject:
                self._hold(holders.OBJECTS, obj, owner, path)
                self._pending += [(value, owner, path) for value in obj.flat]
            else:
                self._hold(holders.ARRAY, obj, owner, path)
        elif hasattr(obj, "strides"):
            self._pending.append((obj.base, owner, path))  # it shows what others write
        elif hasattr(obj, "bit_generator"):
            self._hold(holders.NUMPY_GENERATOR, obj, owner, path)
        elif isinstance(obj, _older_generator()) and obj is not _generator_of_numpy():
            self._hold(holders.OLDER_NUMPY_GENERATOR, obj, owner, path)

    def _class(self, kind: type) -> None:
        metaclass: type = type(kind)
        for base in (*kind.__mro__, *metaclass.__mro__):
            if base in self._classes or not is_users(holders.module_of(base)):
                continue
            self._classes.add(base)
            self._seen.add(id(base))
            before = holders.CLASS.read(base)
            if holders.can_change(base):
                self._hold(holders.CLASS, base, None, base.__qualname__)
            for key, value in before.items():
                value = getattr(value, "__func__", value)
                if isinstance(value, property):
                    self._pending.append((value.fget, None, f"{base.__qualname__}.{key}"))
                else:
                    self._pending.append((value, None, f"{base.__qualname__}.{key}"))

    def _function(self, function: types.FunctionType, owner: Owner | None, path: str) -> None:
        # What wraps another function has its module for a name.
        if not is_users(function.__module__ or "") and not is_users(
            function.__globals__.get("__name__") or ""
        ):
            # As PyTorch puts functions of others into its own hooks.
            contents = map(holders.CELL.read, function.__closure__ or ())
            self._pending += [(each, None, path) for each in contents if isinstance(each, _CODE)]
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._hold(holders.CELL, cell, None, name)
            content = holders.CELL.read(cell)
            if content is not MISSING:
                self._pending.append((content, None, name))
        self._hold(holders.FUNCTION, function, None, path)
        for value in (function.__defaults__, function.__kwdefaults__, vars(function)):
            self._pending.append((value, None, path))
        names = _names_of(function.__code__)
        self._names |= names
        made_up = made_up_in(function.__code__)
        self._made_up |= made_up
        namespace = function.__globals__
        if made_up.names_globals:
            self._whole[id(namespace)] = namespace, function.__module__
        self._entries(namespace, names, function.__module__)
        for name in sorted(names - namespace.keys()):  # imported within the function
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType) and is_users(module.__name__):
                self._named_module(module, names, name)
        if names & {"environ", "getenv"}:
            self._pending.append((os.environ, None, "os.environ"))

    def _entries(self, namespace: dict[str, Any], names: frozenset[str], path: str) -> None:
        """Takes what code that names ``names`` can see of a namespace."""
        here = frozenset(filter(namespace.__contains__, names))
        key = (id(namespace), here)
        if not here or key in self._namespaces:
            return
        self._namespaces.add(key)
        named = tuple(sorted(here))
        self._hold(holders.entries(named), namespace, None, f"a global of {path}")
        for name in named:
            value = namespace[name]
            if not isinstance(value, types.ModuleType):
                self._pending.append((value, None, name))
            elif is_users(value.__name__):
                self._named_module(value, names, name)
            else:
                self._patched_module(value, names, name)

    def _named_module(self, module: types.ModuleType, names: frozenset[str], path: str) -> None:
        if (module, names) not in self._named_modules:
            self._named_modules[module, names] = None
            self._hold(holders.names(names), vars(module), None, path)
            self._entries(vars(module), names, path)

    def _patched_module(self, module: types.ModuleType, names: frozenset[str], path: str) -> None:
        """Takes what code names in a module of others, whose own state is not looked into.

        A script may put something there, or replace a function.
        """
        space = vars(module)
        key = (id(space), names)
        if key in self._namespaces:
            return
        self._namespaces.add(key)
        here = names & space.keys()
        if found := tuple(sorted(e for e in here if not isinstance(space[e], types.ModuleType))):
            self._hold(holders.entries(found), space, None, path)
        # Others import, or make, things when they are named.
        if type(module) is types.ModuleType and "__getattr__" not in space:
            self._hold(holders.names(names - space.keys()), space, None, path)


def _attributes_of(obj: Any) -> holders.Kind:
    """Returns how the attributes of a module or an optimizer are read."""
    return holders.SHOWN if holders.is_of_library(obj) else holders.DICT


def _behind(proxy: Any) -> Any:
    """Returns what a weak proxy stands for; None if that is gone."""
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


def _older_generator() -> type:
    """Returns NumPy's class of generators that are no ``Generator``."""
    kind: type = sys.modules["numpy"].random.RandomState
    return kind


def _generator_of_numpy() -> Any:
    """Returns the generator behind the functions of ``numpy.random``, which has keys."""
    return sys.modules["numpy"].random.rand.__self__


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(names_in(code))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names that code has, those of functions in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant  # may name a global, or an attribute
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def is_users(module: str) -> bool:
    """Whether code may have state of the user's: not torch's, ours, nor an installed package's."""
    package = module.partition(".")[0]
    if package in ("torch", "builtins", "numpy", _OWN_PACKAGE) or (
        package in sys.stdlib_module_names and package != "__main__"
    ):
        return False
    file: object = getattr(sys.modules.get(module), "__file__", None)
    return not (isinstance(file, str) and _is_installed(module, file))


@functools.cache
def _is_installed(module: str, file: str) -> bool:
    """Whether a module lies where packages are installed: a folder with the metadata of some."""
    place = Path(file)
    above = module.count(".") + (place.stem == "__init__")
    folder = place.parents[above] if above < len(place.parents) else place.parent
    return any(folder.glob("*.dist-info"))
