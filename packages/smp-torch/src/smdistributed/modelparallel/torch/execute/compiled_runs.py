"""Runs of calls between modules, as compiled functions.

Layers of a model have alike runs between them: what differs by names alone is compiled once.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import linecache
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.between import atomic
from smdistributed.modelparallel.torch.compat.private.compiled import compiler_errors

logger = logging.getLogger(__name__)

#: Functions that are compiled for one step function: it takes seconds each, and Python that gives
#: another number in every step makes a new one each time.
_MOST_COMPILED = 64
#: Of the files that the code of runs is from.
_numbers = itertools.count()


class CompiledRuns:
    """The runs of one step function.

    Args:
        options: of ``torch.compile``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {"fullgraph": True, "dynamic": False, **options}
        self._known: dict[object, CompiledRun] = {}

    def of(self, source: str, names: Mapping[str, Any], looks: object) -> Callable[..., Any]:
        """Returns a function that does what source code says.

        Args:
            source: of a function, whose statements assign to variables and call.
            names: what it knows besides its parameters.
            looks: all that the compiler can see of its arguments.
        """
        renaming = _Renaming(names)
        text = ast.unparse(renaming.visit(ast.parse(source)))
        key = text, tuple(map(id, renaming.constants.values())), looks
        if key not in self._known:
            own = {"torch": torch, **renaming.constants}
            exec(compile(text, _file_of(text), "exec"), own)
            if len(self._known) == _MOST_COMPILED:
                _tell(f"{_MOST_COMPILED} different ones are already")
                function: Callable[..., Any] = own["run"]
                return function
            self._known[key] = CompiledRun(own["run"], self._options)
        return self._known[key]


def _file_of(text: str) -> str:
    """Returns the name of a file that Python takes source code to be from.

    PyTorch 2.11 wraps functions without a file in one of its own, and counts what it compiles of
    them together: behind the eighth it raises an error.
    """
    name = f"<between two modules {next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return name


class CompiledRun:
    """A run, compiled when it is first called; what the compiler refuses runs as it is.

    Args:
        function: what it does, as it is.
        options: of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._call = torch.compile(function, **options)

    @atomic
    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Computes it."""
        try:
            return self._call(*tensors)
        except compiler_errors() as error:
            # The first line may say no more than which backend it was.
            _tell(" ".join(str(error).strip().splitlines()[:2]))
            self._call = self._function
            return self._function(*tensors)


@functools.cache
def _tell(reason: str) -> None:
    logger.warning("functions between two modules are not compiled: %s", reason)


class _Renaming(ast.NodeTransformer):
    """Names variables, and what they are computed from, in the order in which they are met.

    Args:
        names: what the code knows.

    Attributes:
        constants: what it uses of that, by its new name.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._new: dict[str, str] = {}
        self.constants: dict[str, Any] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Renames the function, and what is in it."""
        node.name = "run"
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Renames a parameter."""
        node.arg = self._of(node.arg)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Renames a variable or a constant."""
        node.id = self._of(node.id)
        return node

    def _of(self, name: str) -> str:
        if name == "torch" or hasattr(builtins, name):
            return name
        if name not in self._new:
            is_constant = name in self._names
            self._new[name] = f"{'c' if is_constant else 'v'}{len(self._new)}"
            if is_constant:
                self.constants[self._new[name]] = self._names[name]
        return self._new[name]
