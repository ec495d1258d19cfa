"""Arguments of calls as expressions of Python, for code that is generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

#: What is written as Python shows it: it says all there is, and is equal in each process.
_LITERALS = (type(None), bool, int, str, type(Ellipsis), torch.dtype, torch.layout)


def expression(obj: Any, name: Callable[[Any], str | None], constant: Callable[[Any], str]) -> str:
    """Returns the code of an argument; it needs ``torch`` among its names.

    Args:
        obj: the argument: a structure of tuples, lists, dicts and slices.
        name: returns the code of what the calls before have made; None of anything else.
        constant: returns the name of an object that the code cannot make.
    """

    def code(obj: Any) -> str:
        named = name(obj)
        if named is not None:
            return named
        kind = type(obj)
        if kind in _LITERALS or (kind is float and math.isfinite(obj)):
            return repr(obj)
        if kind is torch.device:
            return f"torch.device({str(obj)!r})"
        if kind is torch.Size:
            return f"torch.Size({tuple(obj)!r})"
        if kind is tuple:
            return "(" + "".join(f"{code(each)}, " for each in obj) + ")"
        if kind is list:
            return "[" + ", ".join(map(code, obj)) + "]"
        if kind is dict:
            return "{" + ", ".join(f"{code(key)}: {code(obj[key])}" for key in obj) + "}"
        if kind is slice:
            return f"slice({', '.join(map(code, (obj.start, obj.stop, obj.step)))})"
        return constant(obj)

    return code(obj)
