"""Names appear in, and vanish from, the public modules only with a changelog fragment."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import public_names
import pytest

ROOT = "smdistributed.modelparallel"
HAS = {f"{ROOT}.torch.step", f"{ROOT}.torch.init"}


@pytest.mark.parametrize("package", public_names.MODULES)
def test_public_names_are_announced(package: str) -> None:
    """This is the gate: what it says tells what to do."""
    if importlib.util.find_spec(public_names.MODULES[package][-1]) is None:
        pytest.fail(f"{package} is not installed here: install it, or use 'nox -s lint -- house'.")
    folder = public_names.PACKAGES / package
    found = public_names.problems(package, public_names.names_of(package), folder)
    assert not found, "\n" + "\n".join(found)


def test_what_the_reference_documents_is_public() -> None:
    pages = (public_names.PACKAGES.parent / "docs/api").glob("*.md")
    # Of other modules, a class may be shown that a public function returns.
    whole = r"automodule:: (\S+)"
    documented = {module for page in pages for module in re.findall(whole, page.read_text())}
    public = {module for modules in public_names.MODULES.values() for module in modules}
    assert documented
    assert documented <= public, "add it to MODULES in tools/public_names.py"


def test_modules_without_a_list_give_what_they_define() -> None:
    names = public_names.names_of("smp-common")
    assert f"{ROOT}.__version__" in names
    assert f"{ROOT}.common.groups.CommGroup" in names  # a class
    assert f"{ROOT}.common.testing.run_ranks" in names  # a function
    assert f"{ROOT}.common.failure.RECORDS_VARIABLE" in names  # a constant
    assert f"{ROOT}.common.testing.Path" not in names
    assert not [name for name in names if "._" in name and not name.endswith("__version__")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package with two names: one released, one announced by a fragment."""
    (tmp_path / "changelog.d").mkdir()
    for fragment in ("+new.added.md", "+old.removed.md"):
        (tmp_path / "changelog.d" / fragment).write_text("A sentence.\n")
    public_names.write(
        tmp_path, {f"{ROOT}.torch.step": "0.1.0", f"{ROOT}.torch.init": "+new.added.md"}
    )
    assert not public_names.problems("smp-torch", HAS, tmp_path)
    return tmp_path


def one_problem(folder: Path, names: set[str]) -> str:
    (found,) = public_names.problems("smp-torch", names, folder)
    return found


def test_a_new_name_needs_a_fragment(folder: Path) -> None:
    more = HAS | {f"{ROOT}.torch.speed"}
    found = one_problem(folder, more)
    assert found.startswith(f"{ROOT}.torch.speed is public but not recorded")
    assert "nox -s release -- names smp-torch <topic>.added.md" in found
    with pytest.raises(SystemExit, match=r"torch\.speed is, and the fragments given are: none"):
        public_names.update(folder, more, [])
    with pytest.raises(SystemExit, match=r"torch\.speed is, .* given are: \+old\.removed\.md"):
        public_names.update(folder, more, ["+old.removed.md"])
    with pytest.raises(SystemExit, match=r"lies in changelog\.d; got \+speed\.added\.md"):
        public_names.update(folder, more, ["+speed.added.md"])
    public_names.update(folder, more, ["+new.added.md"])
    assert not public_names.problems("smp-torch", more, folder)


def test_a_released_name_vanishes_with_a_fragment(folder: Path) -> None:
    fewer = {f"{ROOT}.torch.init"}
    assert f"{ROOT}.torch.step is recorded as public but not there" in one_problem(folder, fewer)
    with pytest.raises(SystemExit, match=r"each public name that is removed; .*torch\.step is"):
        public_names.update(folder, fewer, ["+new.added.md"])
    public_names.update(folder, fewer, ["+old.removed.md"])
    assert not public_names.problems("smp-torch", fewer, folder)
    assert f"{ROOT}.torch.step is public but not recorded" in one_problem(folder, HAS)
    public_names.update(folder, HAS, ["+new.added.md"])
    assert not public_names.problems("smp-torch", HAS, folder)


def test_a_name_that_no_release_had_just_goes(folder: Path) -> None:
    public_names.update(folder, {f"{ROOT}.torch.step"}, [])
    assert public_names.read(folder) == {f"{ROOT}.torch.step": "0.1.0"}


def test_the_fragment_must_be_there(folder: Path) -> None:
    (folder / "changelog.d/+new.added.md").unlink()
    assert "Fragment +new.added.md announces public names" in one_problem(folder, HAS)


def test_a_release_turns_fragments_into_its_version(folder: Path) -> None:
    public_names.update(folder, HAS - {f"{ROOT}.torch.step"}, ["+old.removed.md"])
    public_names.release(folder, "0.2.0")
    assert public_names.read(folder) == {f"{ROOT}.torch.init": "0.2.0"}
