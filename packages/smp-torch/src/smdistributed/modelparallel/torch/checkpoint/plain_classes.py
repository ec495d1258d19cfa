"""Objects that hold plain values, such as configurations: what of them a checkpoint may bring back.

A pickle names classes and functions, and unpickling calls them, so torch loads tensors and plain
values alone unless it is told otherwise. Configurations are what scripts put beside them. They are
let through by a rule that runs nothing which the file chooses:

- the class is one that the running script has imported itself; no module is imported for the file;
- it is a dataclass, a namespace of argparse, an enumeration, a named tuple, or a class that
  describes itself by ``to_dict`` and ``from_dict``, as configurations of Transformers do; or one of
  a few classes of Python's library;
- an object of it is made without its ``__init__``, ``__new__`` or ``__setstate__``, and given its
  attributes; a class that says otherwise how it is pickled, or what happens at its end, is not let
  through.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import datetime
import enum
import os
import pickle
import secrets
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import PosixPath
from typing import Any, BinaryIO

import torch

#: A class, or what stands for it in unpickling, with the name that a file has for it.
Global = tuple[Callable[..., Any], str]

#: torch's own variable for who trusts all files; torch does not read it where we say what we want.
TRUST_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

#: Of Python's own library, all harmless to make of any arguments.
_KNOWN: dict[str, Callable[..., Any]] = {
    "builtins.frozenset": frozenset,
    "builtins.slice": slice,
    "builtins.range": range,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "pathlib.PosixPath": PosixPath,
    "pathlib._local.PosixPath": PosixPath,
    "types.SimpleNamespace": types.SimpleNamespace,
}


def is_trusted() -> bool:
    """Whether the environment says that all files are trusted, as it says it to torch."""
    return os.environ.get(TRUST_VARIABLE, "").lower() in ("1", "y", "yes", "true")


@contextlib.contextmanager
def plain_classes(path: str | os.PathLike[str]) -> Iterator[None]:
    """Lets ``torch.load(path, weights_only=True)`` make objects of plain classes."""
    allowed: list[Callable[..., Any] | Global] = []
    for name in globals_in(path):
        allowed += allowed_as(name)
    with torch.serialization.safe_globals(allowed):
        yield


def refused_in(file: str | os.PathLike[str] | BinaryIO) -> list[str]:
    """Returns the classes and functions of a file of ``torch.save`` that are not let through."""
    return sorted(name for name in globals_in(file) if not allowed_as(name))


def globals_in(file: str | os.PathLike[str] | BinaryIO) -> list[str]:
    """Returns the names in a file that torch by itself does not let through."""
    # What has another form, torch says itself.
    with contextlib.suppress(ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)
    return []


def allowed_as(name: str) -> list[Global]:
    """Returns what a name in a file stands for; nothing if it is not let through."""
    if name in _KNOWN:
        return [(_KNOWN[name], name)]
    kind = _imported(name)
    if kind is None or not isinstance(kind, type):
        return []
    if type(kind) is enum.EnumType:
        return [(_Members(kind), name)]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return [(_stand_in(kind, lambda args: tuple.__new__(kind, args)), name)]
    if _is_plain(kind):
        # Attributes are given to objects of the class itself; no file can know its name here.
        hidden = secrets.token_hex()
        return [(_stand_in(kind, lambda args: _empty(kind, args)), name), (kind, hidden)]
    return []


def _imported(name: str) -> Any:
    """Returns what goes by a dotted name in the modules that are imported; else None."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:count]))
        if module is None:
            continue
        found: Any = module
        for part in parts[count:]:
            # Not getattr: a module may import what it is asked for.
            found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
        if getattr(found, "__module__", None) == module.__name__:
            return found
    return None


def _is_plain(kind: type) -> bool:
    describes_itself = all(callable(getattr(kind, name, None)) for name in ("to_dict", "from_dict"))
    if not (
        dataclasses.is_dataclass(kind) or issubclass(kind, argparse.Namespace) or describes_itself
    ):
        return False
    set_state = getattr(kind, "__setstate__", None)
    methods = ("__new__", "__reduce__", "__reduce_ex__")
    return (
        type(kind) in (type, abc.ABCMeta)
        and all(getattr(kind, name) is getattr(object, name) for name in methods)
        and not hasattr(kind, "__del__")
        # Dataclasses with slots have one that dataclasses made.
        and (set_state is None or set_state.__module__ == dataclasses.__name__)
    )


def _empty(kind: type, args: tuple[Any, ...]) -> Any:
    if args:
        raise pickle.UnpicklingError(f"{kind.__qualname__} is made without arguments.")
    return object.__new__(kind)


def _stand_in(kind: type, make: Callable[[tuple[Any, ...]], Any]) -> type:
    """Returns a class whose calls make an object of another without running any of its code."""

    def new(_: type, *args: Any) -> Any:
        return make(args)

    return type(kind.__name__, (), {"__new__": new})


class _Members:
    """Finds members of an enumeration by their values."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, value: Any) -> Any:
        for member in self._kind:
            if type(member.value) is type(value) and member.value == value:
                return member
        # Its members can be combined, unless the class says otherwise.
        is_standard = self._kind._missing_.__func__ is getattr(enum.Flag, "_missing_").__func__  # noqa: B009
        if issubclass(self._kind, enum.Flag) and isinstance(value, int) and is_standard:
            return self._kind(value)
        raise pickle.UnpicklingError(f"{self._kind.__qualname__} has no member of value {value!r}.")
