"""The packages, built and installed in every mixture, share one namespace."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).parents[4]
PACKAGES = ("smp-common", "smp-torch", "smp-tf", "smp-launch")
#: What a clean environment must not borrow: our packages, and editable installations of anything.
_OWN = ("smdistributed*", "smp_*", "_smp_*", "*.pth", "__pycache__")
FRAMEWORKS = ("smp-torch", "smp-tf")
#: What both framework packages are the same in; CI has one of them.
ONE_FRAMEWORK = pytest.mark.parametrize(
    "framework", ["smp-torch", pytest.param("smp-tf", marks=pytest.mark.slow)]
)
LEAVES = {
    "smp-common": "common",
    "smp-torch": "torch",
    "smp-tf": "tensorflow",
    "smp-launch": "launch",
}
#: Packages that bring a command.
WITH_COMMANDS = ("smp-common", "smp-launch")
ROOT = "smdistributed/modelparallel"
#: Modules that programs look for beside the leaf packages.
COMPATIBILITY = {
    "smp-common": [f"{ROOT}/backend/__init__.py", f"{ROOT}/backend/exceptions.py"],
    "smp-torch": [f"{ROOT}/test/torch/utils.py"],
    "smp-tf": [],
    "smp-launch": [],
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

#: What each package does first for a user, from nothing but its wheel and what that needs.
SMOKE = {
    "smp-common": """
from smdistributed.modelparallel.common.config import load
assert load("pytorch", {"partitions": 2, "ddp": True}).pipeline_parallel_degree == 2
""",
    "smp-torch": """
import torch, smdistributed.modelparallel.torch as smp
smp.init({"microbatches": 2, "ddp": True})
assert (smp.rank(), smp.size(), smp.pp_size()) == (0, 1, 1)
weight = torch.nn.Linear(4, 1, bias=False)
model = smp.DistributedModel(weight)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def train(model, inputs):
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss

losses = []
for _ in range(3):
    optimizer.zero_grad()
    losses.append(train(model, torch.eye(4)).reduce_mean().item())
    optimizer.step()
assert losses[0] > losses[1] > losses[2] > 0, losses
""",
    "smp-tf": """
import tensorflow as tf, smdistributed.modelparallel.tensorflow as smp
smp.init({"partitions": 1, "microbatches": 2})
assert (smp.rank(), smp.size(), smp.pp_size()) == (0, 1, 1)
layer = tf.keras.layers.Dense(1, use_bias=False)
model = smp.DistributedModel(tf.keras.Sequential([layer]))
optimizer = tf.keras.optimizers.SGD(0.1)

@smp.step
def train(inputs):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs)))
    return tape.gradient(loss, model.trainable_variables), loss

losses = []
for _ in range(3):
    gradients, loss = train(tf.eye(4))
    means = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(means, model.trainable_variables))
    losses.append(float(loss.reduce_mean()))
assert losses[0] > losses[1] > losses[2] > 0, losses
""",
    "smp-launch": """
from smdistributed.modelparallel.launch.pytorch import PyTorch
assert PyTorch("train.py", instance_count=1).instance_type == "local"
""",
}
RANK = "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1))"


def attempt(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command, which may fail."""
    # Not ours to inherit: a path to the sources would hide what is missing in a wheel.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # Programs of what is borrowed, such as mpirun, are beside this interpreter.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=280
    )


def run(*command: str | Path) -> str:
    """Runs a command; returns its output, or fails the test with all that it said."""
    done = attempt(*command)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def declared(package: str, key: str) -> str:
    metadata = tomllib.loads((REPOSITORY / "packages" / package / "pyproject.toml").read_text())
    return str(metadata["project"][key])


def common_range(framework: str) -> Requirement:
    """Returns the versions of smp-common that a framework package declares to need."""
    metadata = tomllib.loads((REPOSITORY / "packages" / framework / "pyproject.toml").read_text())
    needed = map(Requirement, metadata["project"]["dependencies"])
    (common,) = (each for each in needed if each.name == "smp-common")
    return common


def stem(package: str, version: str = "") -> str:
    return f"{package.replace('-', '_')}-{version or declared(package, 'version')}"


def wheel(dist: Path, package: str, version: str = "") -> Path:
    return dist / f"{stem(package, version)}-py3-none-any.whl"


def build(source: Path, folder: Path, *words: str) -> None:
    """Builds an sdist, and a wheel from it, into a folder."""
    run(sys.executable, "-m", "build", "--no-isolation", *words, "--outdir", folder, source)


def build_common(folder: Path, version: str) -> Path:
    """Builds smp-common as if this were its version; returns the wheel."""
    source = folder / "source"
    shutil.copytree(REPOSITORY / "packages/smp-common", source)
    file = source / "pyproject.toml"
    line = f'version = "{declared("smp-common", "version")}"'
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, f'version = "{version}"'))
    build(source, folder, "--wheel")
    return wheel(folder, "smp-common", version)


def editable(package: str) -> list[str | Path]:
    return ["--editable", REPOSITORY / "packages" / package]


def probe(environment: CleanEnvironment, *packages: str, common: str = "") -> dict[str, str]:
    """Imports the packages there, checks and uses each; returns the file of each leaf package.

    Args:
        environment: where the packages are installed.
        packages: their names.
        common: the version of smp-common there, if not the one of this repository.
    """
    wanted = {LEAVES[package]: package for package in packages}
    smoke = "".join(SMOKE[package] for package in packages)
    found = json.loads(environment.execute(f"LEAVES = {wanted!r}\n{PROBE}{smoke}"))
    assert found["namespace_file"] is None, "smdistributed must be a namespace"
    assert tuple(map(int, found["level"].split("."))) >= (1, 10)
    versions = {package: declared(package, "version") for package in packages}
    if common:
        versions["smp-common"] = common
    for package in packages:
        leaf = found["leaves"][LEAVES[package]]
        assert leaf["typed"], f"{package} ships no py.typed"
        assert leaf["version"] == versions[package]
    return {leaf: about["file"] for leaf, about in found["leaves"].items()}


def lies_in_sources(file: str) -> bool:
    return Path(file).is_relative_to(REPOSITORY)


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment that borrows third-party packages, and has none of ours."""

    python: Path

    def install(self, *words: str | Path) -> None:
        """Installs with pip; each of our packages must then have what it needs."""
        done = self.try_to_install(*words)
        assert done.returncode == 0, done.stderr
        # A later installation may break an earlier one, of which pip only warns.
        lines = attempt(*self._pip, "check").stdout.splitlines()
        assert not [line for line in lines if line.startswith(PACKAGES)]

    def try_to_install(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Installs without an index: nothing but our packages is to be fetched."""
        return attempt(*self._pip, "install", "--no-index", "--no-build-isolation", *words)

    @property
    def _pip(self) -> tuple[str | Path, ...]:
        return (sys.executable, "-m", "pip", "--python", self.python)

    def execute(self, program: str) -> str:
        """Runs a program given as text; warnings are errors."""
        return run(self.python, "-I", "-W", "error", "-c", program)

    def script(self, name: str) -> Path:
        """Returns the path of an installed script."""
        return self.python.parent / name


@pytest.fixture(scope="session")
def dist() -> Path:
    """The folder with the sdist of each package, and the wheel built from that sdist.

    It is dist in the repository: what is published is what these tests had.
    """
    folder = REPOSITORY / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    for name in PACKAGES:
        build(REPOSITORY / "packages" / name, folder)
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
    source = REPOSITORY / "packages" / package / "src"
    modules = {str(path.relative_to(source)) for path in source.glob("**/*.py")}
    assert set(names) == modules | {f"{leaf}py.typed"}


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_says_what_the_project_declares(dist: Path, package: str) -> None:
    with zipfile.ZipFile(wheel(dist, package)) as archive:
        about = f"{stem(package)}.dist-info"
        metadata = message_from_string(archive.read(f"{about}/METADATA").decode())
        licence = archive.read(f"{about}/licenses/LICENSE").decode()
        scripts = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert licence == (REPOSITORY / "LICENSE").read_text()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == declared(package, "requires-python")
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert bool(scripts) is (package in WITH_COMMANDS)


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


@pytest.mark.parametrize(
    "package",
    [
        *("smp-common", "smp-launch"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in FRAMEWORKS),
    ],
)
def test_one_wheel_brings_what_it_needs(
    dist: Path, environment: CleanEnvironment, package: str
) -> None:
    environment.install("--find-links", dist, package)
    probe(environment, *dict.fromkeys(("smp-common", package)))


def test_smprun_starts_processes(dist: Path, environment: CleanEnvironment, tmp_path: Path) -> None:
    environment.install(wheel(dist, "smp-common"))
    smprun = environment.script("smprun")
    assert "--hostfile" in run(smprun, "--help")
    (tmp_path / "rank.py").write_text(RANK)
    out = run(smprun, "-n", "2", tmp_path / "rank.py")
    assert len(re.findall(r"sum 3\b", out)) == 2, out


@pytest.mark.slow
@ONE_FRAMEWORK
def test_a_newer_patch_of_smp_common_runs_framework_packages(
    dist: Path, environment: CleanEnvironment, tmp_path: Path, framework: str
) -> None:
    """It comes to a framework package that was made, and installed, before it."""
    release = Version(declared("smp-common", "version"))
    newer = f"{release.major}.{release.minor}.{release.micro + 1}"
    environment.install("--find-links", dist, framework)
    environment.install(build_common(tmp_path, newer))
    probe(environment, "smp-common", framework, common=newer)


@ONE_FRAMEWORK
def test_an_incompatible_smp_common_is_refused(
    dist: Path, environment: CleanEnvironment, tmp_path: Path, framework: str
) -> None:
    (end,) = (each for each in common_range(framework).specifier if each.operator == "<")
    incompatible = build_common(tmp_path, end.version)
    done = environment.try_to_install(incompatible, wheel(dist, framework))
    assert done.returncode != 0
    assert "ResolutionImpossible" in done.stderr
    assert f"{framework} {declared(framework, 'version')} depends on smp-common<" in done.stdout
    # Where there is a choice, it is left out.
    environment.install("--find-links", dist, "--find-links", tmp_path, framework)
    probe(environment, "smp-common")


@pytest.mark.slow
def test_all_editable(environment: CleanEnvironment) -> None:
    environment.install(*(word for package in PACKAGES for word in editable(package)))
    files = probe(environment, *PACKAGES)
    assert all(map(lies_in_sources, files.values()))


@pytest.mark.parametrize(
    ("installed", "edited"),
    [
        ("smp-common", "smp-torch"),
        ("smp-tf", "smp-common"),
    ],
)
@pytest.mark.slow
def test_a_wheel_beside_an_editable_package(
    dist: Path, environment: CleanEnvironment, installed: str, edited: str
) -> None:
    environment.install(wheel(dist, installed), *editable(edited))
    files = probe(environment, installed, edited)
    assert not lies_in_sources(files[LEAVES[installed]])
    assert lies_in_sources(files[LEAVES[edited]])
