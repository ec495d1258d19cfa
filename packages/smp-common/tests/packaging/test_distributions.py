"""The three packages, built and installed in every mixture, share one namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[4]
PACKAGES = ("smp-common", "smp-torch", "smp-tf")
#: What a clean environment must not borrow: our packages, and editable installations of anything.
_OWN = ("smdistributed*", "smp_*", "_smp_*", "*.pth", "__pycache__")
LEAVES = {"smp-common": "common", "smp-torch": "torch", "smp-tf": "tensorflow"}
ROOT = "smdistributed/modelparallel"
#: Modules that programs look for beside the leaf packages.
COMPATIBILITY = {
    "smp-common": [f"{ROOT}/backend/__init__.py", f"{ROOT}/backend/exceptions.py"],
    "smp-torch": [f"{ROOT}/test/torch/utils.py"],
    "smp-tf": [],
}

PROBE = """
import importlib, json
from importlib.metadata import distribution
from importlib.resources import files
import smdistributed, smdistributed.modelparallel as mp

leaves = {}
for leaf, name in LEAVES.items():
    module = importlib.import_module(f"smdistributed.modelparallel.{leaf}")
    leaves[leaf] = {
        "typed": files(module).joinpath("py.typed").is_file(),
        "version": distribution(name).version,
        "file": module.__file__,
    }
print(json.dumps({
    "namespace_file": getattr(smdistributed, "__file__", None),
    "level": mp.__version__,
    "leaves": leaves,
}))
"""


def run(*command: str | Path) -> str:
    """Runs a command; returns its output, or fails the test with all that it said."""
    # Not ours to inherit: a path to the sources would hide what is missing in a wheel.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=280
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def declared(package: str, key: str) -> str:
    metadata = tomllib.loads((REPOSITORY / "packages" / package / "pyproject.toml").read_text())
    return str(metadata["project"][key])


def stem(package: str) -> str:
    return f"{package.replace('-', '_')}-{declared(package, 'version')}"


def wheel(dist: Path, package: str) -> Path:
    return dist / f"{stem(package)}-py3-none-any.whl"


def editable(package: str) -> list[str | Path]:
    return ["--editable", REPOSITORY / "packages" / package]


def probe(environment: CleanEnvironment, *packages: str) -> dict[str, str]:
    """Imports the packages there and checks each; returns the file of each leaf package."""
    wanted = {LEAVES[package]: package for package in packages}
    found = json.loads(environment.execute(f"LEAVES = {wanted!r}\n{PROBE}"))
    assert found["namespace_file"] is None, "smdistributed must be a namespace"
    assert tuple(map(int, found["level"].split("."))) >= (1, 10)
    for package in packages:
        leaf = found["leaves"][LEAVES[package]]
        assert leaf["typed"], f"{package} ships no py.typed"
        assert leaf["version"] == declared(package, "version")
    return {leaf: about["file"] for leaf, about in found["leaves"].items()}


def lies_in_sources(file: str) -> bool:
    return Path(file).is_relative_to(REPOSITORY)


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment that borrows third-party packages, and has none of ours."""

    python: Path

    def install(self, *words: str | Path) -> None:
        """Installs with pip, without an index: nothing but our packages is to be fetched."""
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-index")
        run(*pip, "--no-build-isolation", *words)

    def execute(self, program: str) -> str:
        """Runs a program given as text; warnings are errors."""
        return run(self.python, "-I", "-W", "error", "-c", program)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist of each package, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for name in PACKAGES:
        source = REPOSITORY / "packages" / name
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


@pytest.fixture(scope="session")
def borrowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to all third-party packages here; PyTorch is large, and so shared."""
    folder = tmp_path_factory.mktemp("borrowed")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if not any(entry.match(pattern) for pattern in _OWN):
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def environment(borrowed: Path, tmp_path: Path) -> CleanEnvironment:
    """An environment without any of our packages."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True, with_pip=False)
    place = {"base": str(home), "platbase": str(home)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars=place))
    (site_packages / "borrowed.pth").write_text(f"{borrowed}\n")
    return CleanEnvironment(home / "bin" / "python")


def test_clean_environments_have_none_of_our_packages(environment: CleanEnvironment) -> None:
    program = "import importlib.util as u; print(u.find_spec('smdistributed'))"
    assert environment.execute(program).strip() == "None"


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_ships_its_own_leaf_and_nothing_above(dist: Path, package: str) -> None:
    with zipfile.ZipFile(wheel(dist, package)) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    leaf = f"{ROOT}/{LEAVES[package]}/"
    above = {name for name in names if not name.startswith(leaf)} - set(COMPATIBILITY[package])
    assert above == ({f"{ROOT}/__init__.py"} if package == "smp-common" else set())
    assert set(COMPATIBILITY[package]) <= set(names)
    assert {f"{leaf}__init__.py", f"{leaf}py.typed"} <= set(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_sdist_is_whole(dist: Path, package: str) -> None:
    with tarfile.open(dist / f"{stem(package)}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tox.ini"} <= names
    folder = REPOSITORY / "packages" / package
    assert {str(test.relative_to(folder)) for test in folder.glob("tests/**/test_*.py")} <= names
    assert f"src/{ROOT}/{LEAVES[package]}/py.typed" in names


def test_descriptions_are_fit_for_a_registry(dist: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))


def test_all_wheels_together(dist: Path, environment: CleanEnvironment) -> None:
    environment.install(*(wheel(dist, package) for package in PACKAGES))
    files = probe(environment, *PACKAGES)
    assert not any(map(lies_in_sources, files.values()))


@pytest.mark.parametrize("package", PACKAGES)
def test_one_wheel_brings_what_it_needs(
    dist: Path, environment: CleanEnvironment, package: str
) -> None:
    environment.install("--find-links", dist, package)
    probe(environment, *dict.fromkeys(("smp-common", package)))


def test_all_editable(environment: CleanEnvironment) -> None:
    environment.install(*(word for package in PACKAGES for word in editable(package)))
    files = probe(environment, *PACKAGES)
    assert all(map(lies_in_sources, files.values()))


@pytest.mark.parametrize(
    ("installed", "edited"), [("smp-common", "smp-torch"), ("smp-tf", "smp-common")]
)
def test_a_wheel_beside_an_editable_package(
    dist: Path, environment: CleanEnvironment, installed: str, edited: str
) -> None:
    environment.install(wheel(dist, installed), *editable(edited))
    files = probe(environment, installed, edited)
    assert not lies_in_sources(files[LEAVES[installed]])
    assert lies_in_sources(files[LEAVES[edited]])
