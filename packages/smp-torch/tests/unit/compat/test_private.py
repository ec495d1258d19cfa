"""What is used of PyTorch beyond its public API does what the package relies on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.compat.private.self_test import self_test

PACKAGE = Path(str(smp.__file__)).parent
#: Of Dynamo's own imports, with some pairs of versions.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


def test_the_installed_pytorch_has_all_of_it() -> None:
    assert self_test() == []


def test_the_test_names_what_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", len)
    (problem,) = self_test()
    assert problem.startswith("norms: UnsupportedError: torch")


def test_no_other_module_names_what_is_private() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "private"
        for node in ast.walk(ast.parse(path.read_text()))
        if _is_private(node)
    ]
    assert found == []


def _is_private(node: ast.AST) -> bool:
    """Whether code imports from a private module of torch, or reads a private name in one."""
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names = [alias.name for alias in node.names]
        return module.split(".")[0] == "torch" and (
            "._" in module or any(name.startswith("_") for name in names)
        )
    if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[-2:] != "__":
        root: ast.AST = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(root, ast.Name) and root.id in ("torch", "dist")
    return False
