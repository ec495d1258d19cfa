"""Which of their own attributes modules read while they compute.

What a module has not read makes no difference to what it has computed: two layers that differ in
their number alone compute alike if nothing asks for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

#: Reading it is reading everything; Module looks up its tensors in it.
EVERYTHING = "__dict__"
_OF_MODULE = nn.Module.__getattr__.__code__.co_filename


@contextlib.contextmanager
def noted(*modules: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Notes what is read inside of modules and those in them: name of the module, of the attribute.

    Args:
        modules: whose inner modules have the same names.
    """
    names = {each: name for module in modules for name, each in module.named_modules()}
    read: set[tuple[str, str]] = set()

    def note(module: nn.Module, attribute: str) -> None:
        name = names.get(module)
        if name is None:
            return
        if attribute != EVERYTHING:
            read.add((name, attribute))
        elif sys._getframe(2).f_code.co_filename != _OF_MODULE:
            read.add((name, EVERYTHING))

    kinds: set[Any] = {type(each) for module in modules for each in module.modules()}
    # Of all before the first is replaced: some are subclasses of others.
    before = {kind: kind.__getattribute__ for kind in kinds}
    own = {kind for kind in kinds if "__getattribute__" in vars(kind)}
    try:
        for kind in kinds:
            try:
                kind.__getattribute__ = _telling(before[kind], note)
            except (AttributeError, TypeError):  # not a class of Python's
                of_kind = [each for each in names if type(each) is kind]
                read.update((names[each], EVERYTHING) for each in of_kind)
        yield read
    finally:
        for kind in kinds:
            if kind in own:
                kind.__getattribute__ = before[kind]
            elif "__getattribute__" in vars(kind):
                del kind.__getattribute__


def _telling(before: Any, note: Callable[[nn.Module, str], None]) -> Any:
    def told(module: nn.Module, attribute: str) -> Any:
        note(module, attribute)
        return before(module, attribute)

    return told
