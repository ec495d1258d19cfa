"""Whether code reads by names that are not in it: ``getattr(settings, prefix + "scale")``.

What code names it can see; where it makes names up it may see everything. That is decided by its
bytecode, and in case of doubt it does.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence
from typing import NamedTuple

#: Functions that look up attributes by what they are given.
_OF_ATTRIBUTES = {
    *("getattr", "hasattr", "vars", "dir", "eval", "exec"),
    *("attrgetter", "methodcaller", "getattr_static", "getmembers"),
}
#: Those whose second argument is the name.
_BY_SECOND = {"getattr", "hasattr"}
_OF_GLOBALS = {"globals", "eval", "exec"}
#: The same of attributes of objects: others have some of these names, too (``model.eval()``).
_ATTRIBUTES_OF_ATTRIBUTES = {
    *("__dict__", "__getattribute__", "__getattr__"),
    *("attrgetter", "methodcaller", "getattr_static", "getmembers"),
}
_ATTRIBUTES_OF_GLOBALS = {"__globals__", "f_globals"}
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
_ATTRIBUTE_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}
_CALLS = {"CALL", "CALL_FUNCTION"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


class MadeUp(NamedTuple):
    """What code makes names of up.

    Attributes:
        attributes: of attributes.
        names_globals: of globals of its own module.
    """

    attributes: bool = False
    names_globals: bool = False

    def __or__(self, other: MadeUp) -> MadeUp:
        return MadeUp(*(one or another for one, another in zip(self, other, strict=True)))


@functools.lru_cache(maxsize=4096)
def made_up_in(code: types.CodeType) -> MadeUp:
    """Returns what some code, and that in it, makes names of up."""
    found = _own(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= made_up_in(constant)
    return found


def _own(code: types.CodeType) -> MadeUp:
    names = {*code.co_names, *code.co_freevars}
    if names.isdisjoint(_SUSPECTS):
        return MadeUp()
    found = MadeUp()
    instructions = list(dis.get_instructions(code))
    for place, each in enumerate(instructions):
        name = each.argval
        if not isinstance(name, str):
            continue
        if each.opname in _LOADS:
            is_known = name in _BY_SECOND and _names_a_constant(instructions, place)
            found |= MadeUp(
                name in _OF_ATTRIBUTES and not is_known,
                name in _OF_GLOBALS,
            )
        elif each.opname in _ATTRIBUTE_LOADS:
            found |= MadeUp(name in _ATTRIBUTES_OF_ATTRIBUTES, name in _ATTRIBUTES_OF_GLOBALS)
    return found


_SUSPECTS = {
    *(*_OF_ATTRIBUTES, *_OF_GLOBALS, *_ATTRIBUTES_OF_ATTRIBUTES, *_ATTRIBUTES_OF_GLOBALS),
}


def _names_a_constant(instructions: Sequence[dis.Instruction], start: int) -> bool:
    """Whether a function that is loaded is called at once, with a constant as second argument."""
    depth = 0
    before: list[dis.Instruction] = []
    for each in instructions[start:]:
        if each.opcode in _JUMPS:
            return False
        depth += dis.stack_effect(each.opcode, each.arg, jump=False)
        if each.opname == "PRECALL":  # of Python 3.11: a part of the call
            continue
        if before and depth <= 1:
            if each.opname not in _CALLS or each.arg not in (2, 3):
                return False
            name, *default = before[1 - each.arg :]
            is_one = all(
                it.opname.startswith("LOAD_") and dis.stack_effect(it.opcode, it.arg) == 1
                for it in default
            )
            return name.opname == "LOAD_CONST" and isinstance(name.argval, str) and is_one
        before.append(each)
    return False
