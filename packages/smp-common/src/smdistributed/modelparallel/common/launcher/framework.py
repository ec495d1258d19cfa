"""Which framework a program is for, where the command line does not say it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from smdistributed.modelparallel.common.config import Framework

#: Modules that tell; those of this library before the frameworks themselves.
_SIGNS: tuple[dict[Framework, str], ...] = (
    {
        "pytorch": "smdistributed.modelparallel.torch",
        "tensorflow": "smdistributed.modelparallel.tensorflow",
    },
    {"pytorch": "torch", "tensorflow": "tensorflow"},
)
_OWN = _SIGNS[0]


def guess(program: Sequence[str]) -> Framework:
    """Returns the framework of a program: the one that it imports, else the one that is installed.

    PyTorch, where neither tells.

    Args:
        program: a script, or ``-m`` and a module, with arguments.
    """
    imported = set(_imports(program))
    for signs in _SIGNS:
        if found := _one_of(signs, imported):
            return found
    installed = [framework for framework, package in _OWN.items() if _is_installed(package)]
    return installed[0] if len(installed) == 1 else "pytorch"


def of_own_import(program: Sequence[str]) -> Framework | None:
    """Returns the framework of which a program imports the package of this library, if of one."""
    return _one_of(_OWN, set(_imports(program)))


def _one_of(signs: Mapping[Framework, str], imported: Collection[str]) -> Framework | None:
    found = [
        framework
        for framework, sign in signs.items()
        if any(name == sign or name.startswith(f"{sign}.") for name in imported)
    ]
    return found[0] if len(found) == 1 else None


def _imports(program: Sequence[str]) -> Iterator[str]:
    """Yields the dotted names that a program imports itself; none if it cannot be read."""
    path = _module_file(program[1]) if program[0] == "-m" else Path(program[0])
    tree: ast.AST | None = None
    if path is not None:
        with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError):
            tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_file(name: str) -> Path | None:
    # Of a module in a package, the package would be imported to find it.
    if "." in name:
        return None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            return Path(spec.origin)
    return None


def _is_installed(package: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(package) is not None
    return False
