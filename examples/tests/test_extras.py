"""What the examples import is what the documentation has a reader install."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from running import EXAMPLES

#: The package whose extra ``examples`` serves a folder.
PACKAGES = {"torch": "smp-torch", "tensorflow": "smp-tf"}
#: What an option needs that says so.
OF_AN_OPTION = {"peft"}
#: Distributions whose modules have another name.
MODULES = {"scikit_learn": "sklearn"}
SCRIPTS = [path for name in PACKAGES for path in sorted((EXAMPLES / name).glob("*.py"))]


def installed_with(package: str) -> set[str]:
    """Returns the modules that a package's dependencies and its extra bring."""
    text = (EXAMPLES.parent / "packages" / package / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    names = (re.split(r"[^\w-]", need)[0].replace("-", "_").lower() for need in needed)
    return {MODULES.get(name, name) for name in names} | {"smdistributed"}


@pytest.mark.parametrize("script", [pytest.param(path, id=path.name) for path in SCRIPTS])
def test_an_extra_brings_what_an_example_imports(script: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    found = imported - sys.stdlib_module_names - OF_AN_OPTION
    assert found <= installed_with(PACKAGES[script.parent.name])
