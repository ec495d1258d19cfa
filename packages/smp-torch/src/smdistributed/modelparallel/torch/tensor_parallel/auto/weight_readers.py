"""Which modules read parameters of others, as their code says: ``F.linear(x, self.embed.weight)``.

A module whose parameters others compute with has to have them whole. What the forward of a module
names, and the methods that it names, shows that before anything has run: a way of attributes from
``self`` to a parameter of another module. To ask whether there is a parameter, for its type or its
device is not to read it. What is found in other ways, in loops say, a run shows.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

#: Attributes that a slice and the whole have in common.
_IN_COMMON = frozenset({"dtype", "device", "layout", "requires_grad", "ndim", "is_cuda"})
#: Functions that are given a parameter and do not compute with it, or the first of some for its
#: device.
_ASKING = frozenset({"isinstance", "hasattr", "type", "id", "callable", "next"})
#: Methods of modules that give all of their parameters.
_OF_ALL = frozenset({"parameters", "named_parameters", "state_dict"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_WITHOUT_MEANING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "RESUME"})
#: Attributes and indices, from ``self`` on.
_Way = tuple[str | int, ...]


def read_of_others(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields what the code of a module reads: a module in it, and the name of a parameter."""
    kind: Any = type(module)
    for way in _ways_of(kind):
        found, rest = module, list(way)
        while rest and (inner := _child(found, rest[0])) is not None:
            found = inner
            del rest[0]
        if not rest:
            continue
        name, *then = map(str, rest)
        if name in _OF_ALL:
            for each in found.modules():
                yield from (
                    (each, own) for own, value in each._parameters.items() if value is not None
                )
        elif (
            found is not module
            and found._parameters.get(name) is not None
            and _IN_COMMON.isdisjoint(then[:1])
        ):
            yield found, name


def _child(module: nn.Module, name: str | int) -> nn.Module | None:
    if isinstance(name, str):
        return module._modules.get(name)
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return None
    return module[name] if -len(module) <= name < len(module) else None


@functools.lru_cache(maxsize=4096)
def _ways_of(kind: Any) -> tuple[_Way, ...]:
    """Returns the ways of attributes in the forward of a class, and in the methods that it names.

    Those of torch itself are known: they read what they have.
    """
    found: dict[_Way, None] = {}
    pending, seen = ["forward"], {"forward"}
    while pending:
        method = inspect.unwrap(getattr(kind, pending.pop(), _nothing))  # of a decorator
        if not isinstance(method, types.FunctionType) or method.__module__.startswith("torch."):
            continue
        code = method.__code__
        if code.co_argcount:
            found.update(dict.fromkeys(_ways_in(code, code.co_varnames[0])))
        for name in code.co_names:
            if name not in seen and isinstance(getattr(kind, name, None), types.FunctionType):
                seen.add(name)
                pending.append(name)
    return tuple(found)


def _nothing() -> None:
    """Stands for a method that a class does not have."""


def _ways_in(code: types.CodeType, owner: str) -> Iterator[_Way]:
    """Yields the ways of attributes that start at a variable, in a function and those in it."""
    instructions = [each for each in dis.get_instructions(code) if _means_something(each)]
    for place, each in enumerate(instructions):
        if not each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            continue
        if owner != (each.argval[-1] if isinstance(each.argval, tuple) else each.argval):
            continue
        before = instructions[place - 1] if place else None
        if before is not None and before.opname == "LOAD_GLOBAL" and before.argval in _ASKING:
            continue
        way, end = _way_from(instructions, place + 1)
        if way and not _asks_for_none(instructions[end : end + 2]):
            yield way
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and owner in constant.co_freevars:
            yield from _ways_in(constant, owner)


def _means_something(instruction: dis.Instruction) -> bool:
    return instruction.opname not in _WITHOUT_MEANING


def _way_from(instructions: list[dis.Instruction], place: int) -> tuple[_Way, int]:
    """Returns the attributes and indices that are read one of the other, and where that ends."""
    way: list[str | int] = []
    while place < len(instructions):
        each = instructions[place]
        following = instructions[place + 1] if place + 1 < len(instructions) else None
        if each.opname in _ATTRIBUTES:
            way.append(each.argval)
            place += 1
        elif type(each.argval) is int and following is not None and _takes_item(each, following):
            way.append(each.argval)
            place += 2
        else:
            break
    return tuple(way), place


def _takes_item(index: dis.Instruction, taking: dis.Instruction) -> bool:
    is_item = taking.opname == "BINARY_SUBSCR" or taking.argrepr == "[]"
    return index.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and is_item


def _asks_for_none(following: list[dis.Instruction]) -> bool:
    """Whether what comes next compares with None."""
    if not following:
        return False
    if "NONE" in following[0].opname:
        return True
    is_none = following[0].opname == "LOAD_CONST" and following[0].argval is None
    return is_none and following[-1].opname == "IS_OP"
