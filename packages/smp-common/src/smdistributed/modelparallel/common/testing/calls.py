"""A function call that another process makes: found again by its file, module and name."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Call:
    """What to call.

    Attributes:
        file: of the function's module.
        module: its name.
        name: of the function in it.
        args: its arguments, pickled; they may be of classes of that module.
        search: where the caller looks for modules.
    """

    file: str
    module: str
    name: str
    args: bytes
    search: tuple[str, ...]

    @staticmethod
    def to(function: Callable[..., object], args: Sequence[object]) -> Call:
        """Returns the call of a function at the top level of a module.

        Raises:
            ValueError: it is not, so that nothing could find it again.
        """
        if function.__qualname__ != function.__name__ or function.__name__ == "<lambda>":
            raise ValueError(
                f"a body must be a function at the top level of its module; received "
                f"{function.__qualname__}: move it out of its class or function."
            )
        # Not what this function may be wrapped in: that is what the name stands for there too.
        file = os.path.abspath(inspect.getfile(inspect.unwrap(function)))
        arguments = pickle.dumps(tuple(args))
        return Call(file, function.__module__, function.__name__, arguments, tuple(sys.path))

    def __call__(self) -> Any:
        """Imports the function and calls it."""
        for place in (os.path.dirname(self.file), *self.search):
            if place not in sys.path:
                sys.path.append(place)
        function = getattr(_module(self.file, self.module), self.name)
        return function(*pickle.loads(self.args))


def _module(file: str, name: str) -> ModuleType:
    """Returns the module of a file, imported once."""
    present = sys.modules.get(name)
    if present is not None and getattr(present, "__file__", None) == file:
        return present
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
