"""The names that users may rely on: each has an entry in its package's public_names.txt.

A line of the file is a name and what announces it: the version that brought it or, until the next
release, the changelog fragment. A name that is gone stays with its fragment until the next release.

Usage: ``python tools/public_names.py smp-torch +streams.added.md +old-hooks.removed.md`` records
what appeared under the first fragment, and what is gone under the second.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

PACKAGES = Path(__file__).parents[1] / "packages"
_ROOT = "smdistributed.modelparallel"
#: The modules that users import, in a package's order. All others may change at any time.
MODULES = {
    "smp-common": (
        _ROOT,
        f"{_ROOT}.backend.exceptions",
        f"{_ROOT}.common.checkpoint.directory",
        f"{_ROOT}.common.comm.communicator",
        f"{_ROOT}.common.config",
        f"{_ROOT}.common.errors",
        f"{_ROOT}.common.failure",
        f"{_ROOT}.common.groups",
        f"{_ROOT}.common.microbatch",
        f"{_ROOT}.common.planning.partitioner",
        f"{_ROOT}.common.planning.report",
        f"{_ROOT}.common.planning.schedule",
        f"{_ROOT}.common.planning.simulator",
        f"{_ROOT}.common.search.plan",
        f"{_ROOT}.common.testing",
        f"{_ROOT}.common.topology",
    ),
    "smp-torch": (
        f"{_ROOT}.test.torch.utils",
        f"{_ROOT}.torch",
        f"{_ROOT}.torch.amp",
        f"{_ROOT}.torch.exceptions",
        f"{_ROOT}.torch.nn",
        f"{_ROOT}.torch.optimizers",
        f"{_ROOT}.torch.patches.checkpoint",
        f"{_ROOT}.torch.sharded_data_parallel_checkpoint",
        f"{_ROOT}.torch.state_mod",
        f"{_ROOT}.torch.utils",
    ),
    "smp-tf": (f"{_ROOT}.tensorflow",),
    "smp-launch": (
        f"{_ROOT}.launch",
        f"{_ROOT}.launch.analytics",
        f"{_ROOT}.launch.debugger",
        f"{_ROOT}.launch.deserializers",
        f"{_ROOT}.launch.estimator",
        f"{_ROOT}.launch.exceptions",
        f"{_ROOT}.launch.huggingface",
        f"{_ROOT}.launch.image_uris",
        f"{_ROOT}.launch.inputs",
        f"{_ROOT}.launch.model",
        f"{_ROOT}.launch.names",
        f"{_ROOT}.launch.predictor",
        f"{_ROOT}.launch.pytorch",
        f"{_ROOT}.launch.s3",
        f"{_ROOT}.launch.serializers",
        f"{_ROOT}.launch.session",
        f"{_ROOT}.launch.tensorflow",
        f"{_ROOT}.launch.tracking",
        f"{_ROOT}.launch.trainer.configs",
        f"{_ROOT}.launch.trainer.distributed",
        f"{_ROOT}.launch.trainer.model_trainer",
        f"{_ROOT}.launch.trainer.resources",
        f"{_ROOT}.launch.utils",
    ),
}


def names_of(package: str) -> set[str]:
    """Returns the public names of a package that is installed here."""
    modules = map(importlib.import_module, MODULES[package])
    return {f"{module.__name__}.{name}" for module in modules for name in _names_in(module)}


def _names_in(module: ModuleType) -> Iterable[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    # From the text: what a module only imports is not its own.
    defined = _defined_in(ast.parse(inspect.getsource(module)))
    return [name for name in defined if not name.startswith("_") or name == "__version__"]


def _defined_in(tree: ast.Module) -> Iterable[str]:
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def file_of(folder: Path) -> Path:
    """Returns the file with the public names of the package in this folder."""
    return folder / "public_names.txt"


def read(folder: Path) -> dict[str, str]:
    """Returns what announces each recorded name."""
    words = file_of(folder).read_text().split()
    return dict(zip(words[::2], words[1::2], strict=True))


def write(folder: Path, announced: dict[str, str]) -> None:
    """Records the names, sorted."""
    file_of(folder).write_text("".join(f"{name} {by}\n" for name, by in sorted(announced.items())))


def problems(package: str, names: set[str], folder: Path) -> list[str]:
    """Returns what is wrong with the records in a package's folder; names are those it has."""
    announced = read(folder)
    there = {name for name, by in announced.items() if not by.endswith(".removed.md")}
    run = f"'nox -s release -- names {package}"
    found = [
        f"{name} is public but not recorded: say what it is in a fragment in changelog.d, then run "
        f"{run} <topic>.added.md'; or begin its name with an underscore."
        for name in sorted(names - there)
    ]
    found += [
        f"{name} is recorded as public but not there: say so in a fragment in changelog.d, then "
        f"run {run} <topic>.removed.md'; or bring it back."
        for name in sorted(there - names)
    ]
    fragments = {by for by in announced.values() if by.endswith(".md")}
    found += [
        f"Fragment {fragment} announces public names but is not in changelog.d: write it, or name "
        f"another in public_names.txt."
        for fragment in sorted(fragments)
        if not (folder / "changelog.d" / fragment).is_file()
    ]
    return found


def update(folder: Path, names: set[str], fragments: Iterable[str]) -> None:
    """Records what appeared or is gone under the fragments given.

    Raises:
        SystemExit: there is no such fragment, or none for what changed.
    """
    announced = read(folder) if file_of(folder).exists() else {}
    by_kind = {}
    for fragment in fragments:
        if not (folder / "changelog.d" / fragment).is_file():
            sys.exit(
                f"A fragment lies in changelog.d; got {fragment}, which is not there: write it."
            )
        by_kind[fragment.split(".")[-2]] = fragment
    for name in names:
        if announced.get(name, "removed.md").endswith("removed.md"):
            announced[name] = _fragment(by_kind, "added", name)
    for name in announced.keys() - names:
        if announced[name].endswith(".added.md"):
            del announced[name]  # no user has seen it
        elif not announced[name].endswith(".removed.md"):
            announced[name] = _fragment(by_kind, "removed", name)
    write(folder, announced)


def _fragment(by_kind: dict[str, str], kind: str, name: str) -> str:
    if kind not in by_kind:
        got = ", ".join(by_kind.values()) or "none"
        sys.exit(
            f"A fragment announces each public name that is {kind}; {name} is, and the fragments "
            f"given are: {got}. Write changelog.d/<topic>.{kind}.md and add it to the command."
        )
    return by_kind[kind]


def release(folder: Path, version: str) -> None:
    """Records that this version has what was announced by fragments."""
    write(
        folder,
        {
            name: version if by.endswith(".md") else by
            for name, by in read(folder).items()
            if not by.endswith(".removed.md")
        },
    )


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        sys.exit(f"Usage: public_names.py PACKAGE [FRAGMENT ...]; PACKAGE: {', '.join(MODULES)}.")
    _, chosen, *given = sys.argv
    update(PACKAGES / chosen, names_of(chosen), given)
