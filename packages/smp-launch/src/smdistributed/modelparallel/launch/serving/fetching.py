"""The model of an endpoint, and the script that comes with it, from their archives."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job.code import unpack
from smdistributed.modelparallel.launch.request.serving import PROGRAM, SUBMIT_DIRECTORY
from smdistributed.modelparallel.launch.serving.folder import EndpointFolder
from smdistributed.modelparallel.launch.storage.places import locate
from smdistributed.modelparallel.launch.storage.transfer import download

#: Where a model's archive has its script, as containers of the service look for it.
_IN_ARCHIVE = "code"
_DEFAULT_PROGRAM = "inference.py"
_CONTAINER = "/opt/ml/model"


def fetch(folder: EndpointFolder) -> Path | None:
    """Unpacks a model, and its script; returns the script, or None where there is none.

    Raises:
        StorageError: an archive cannot be read.
        LaunchError: it is none, or the script that is named is not in it.
    """
    container = folder.container()
    assert container.model_data_url is not None
    _unpack(folder, container.model_data_url, folder.model)
    place = container.environment.get(SUBMIT_DIRECTORY, "")
    if place.startswith(_CONTAINER):
        code = folder.model / place.removeprefix(_CONTAINER).lstrip("/")
    elif place:
        code = folder.code
        _unpack(folder, place, code)
    else:
        code = folder.model / _IN_ARCHIVE
    named = container.environment.get(PROGRAM)
    script = code / (named or _DEFAULT_PROGRAM)
    if script.is_file():
        return script
    if named:
        raise LaunchError(f"{PROGRAM} must be a file of the code; there is no {named} in {code}.")
    return None


def functions(script: Path | None, names: Collection[str]) -> ModuleType | None:
    """Imports a script that defines one of some functions; returns None where it defines none.

    A script that only trains is not imported: that would train again.
    """
    if script is None or not _defines(script, names):
        return None
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the script pickled under its own name is found.
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


def _defines(script: Path, names: Collection[str]) -> bool:
    tree = ast.parse(script.read_text(encoding="utf-8"), str(script))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    if any(isinstance(node, kinds) and node.name in names for node in ast.walk(tree)):
        return True
    imported = (
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    return any(name in names for name in imported)


def _unpack(folder: EndpointFolder, address: str, target: Path) -> None:
    source = locate(address, folder.root)
    if path := source.local:
        unpack(path, target)
        return
    archive = folder.path / f"{target.name}.tar.gz"
    download(source, archive)
    unpack(archive, target)
    archive.unlink()
