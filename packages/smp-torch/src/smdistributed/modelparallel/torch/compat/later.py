"""Compatibility: documented features that are not there yet.

Scripts import their names whether or not they use them, so the names exist; using one says that it
is not supported yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from smdistributed.modelparallel.common.errors import UnsupportedError


def later_function(name: str) -> Callable[..., NoReturn]:
    """Returns a function of this name that says that it is not supported yet."""

    def later(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name} is not supported yet.")

    later.__name__ = later.__qualname__ = name.rpartition(".")[2]
    later.__doc__ = "Not supported yet."
    return later


def later_class(name: str, base: type) -> type[Any]:
    """Returns a class that can be imported, subclassed and asked for instances, but has none.

    Args:
        name: as a script spells it, ``smp.nn.DistributedLinear``.
        base: its base class.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name} is not supported yet.")

    return type(
        name.rpartition(".")[2],
        (base,),
        {"__new__": refuse, "__doc__": "Not supported yet.", "__module__": __name__},
    )


def translations(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """Returns a ``__getattr__`` that gives a module its functions between two forms of a state.

    They went by several generations of names, so every name of their kind is one.
    """

    def find(name: str) -> Callable[..., NoReturn]:
        if name.startswith(("translate_", "get_hf_")):
            return later_function(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
