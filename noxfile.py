"""What one does with this repository; ``nox --list`` shows it.

A check is a plain function that runs in an environment which has what it needs. A session makes
the environment of one check; ``tests`` makes one environment for all of them.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = True
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
PACKAGES = ("smp-common", "smp-torch", "smp-tf")
SOURCES = ("packages", "tools", "examples", "docs", "benchmarks", "noxfile.py")
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Many processes share few cores: threads of their own would hold them up.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


# Environments


def install_groups(session: nox.Session, *groups: str) -> None:
    """Installs dependency groups of the root pyproject.toml."""
    session.install(*nox.project.dependency_groups(GROUPS, *groups))


def install_torch(session: nox.Session, *version: str) -> None:
    """Installs PyTorch, the CPU build where no GPU is; see tools/install_torch.py."""
    session.run("python", "tools/install_torch.py", *version)


def install_packages(session: nox.Session, *packages: str, editable: bool = False) -> None:
    """Installs packages of this repository and what they need.

    In one pip call, so that pip takes smp-common from here and not from the registry.
    """
    if "smp-torch" in packages:
        install_torch(session)
    flag = ["--editable"] if editable else []
    session.install(*(word for name in packages for word in (*flag, f"./packages/{name}")))


def with_common(package: str) -> tuple[str, ...]:
    """Returns the packages to install for the tests of one."""
    return tuple(dict.fromkeys(("smp-common", package)))


def suites(kind: str, packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Returns the directories of the tests of this kind; packages without any have none."""
    places = (f"packages/{name}/tests/{kind}" for name in packages)
    return [place for place in places if (ROOT / place).is_dir()]


def having(kind: str) -> list[str]:
    """Returns the packages that have tests of this kind."""
    return [name for name in PACKAGES if suites(kind, (name,))]


def lowest(package: str) -> list[str]:
    """Returns the lowest versions that a package declares of what it needs, PyTorch aside."""
    metadata = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())
    needed = [Requirement(text) for text in metadata["project"]["dependencies"]]
    return [
        f"{need.name}=={bound.version}"
        for need in needed
        if need.name not in (*PACKAGES, "torch")
        for bound in need.specifier
        if bound.operator == ">="
    ]


# Checks


def check_lint(session: nox.Session) -> None:
    present = [place for place in SOURCES if (ROOT / place).exists()]
    session.run("ruff", "check", *present)
    session.run("ruff", "format", "--check", *present)


def check_types(session: nox.Session) -> None:
    leaves = ("backend", "common", "torch", "tensorflow")
    session.run(
        "mypy", *(w for leaf in leaves for w in ("-p", f"smdistributed.modelparallel.{leaf}"))
    )
    session.run("mypy", "noxfile.py", "tools/install_torch.py")


def check_imports(session: nox.Session) -> None:
    session.run("lint-imports", "--no-cache")


def check_docs(session: nox.Session) -> None:
    shutil.rmtree(ROOT / "docs/_build", ignore_errors=True)
    session.run(
        "sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html"
    )
    session.log("open docs/_build/html/index.html")


def check_builds(session: nox.Session) -> None:
    session.run("pytest", "-m", "slow", *suites("packaging"))


def check_units(session: nox.Session, *packages: str) -> None:
    session.run("pytest", "-m", "not slow", *suites("unit", packages), *session.posargs)


def check_processes(session: nox.Session, *packages: str) -> None:
    places = suites("multiproc", packages) + suites("architectures", packages)
    session.run("pytest", "-m", "multiproc", *places, *session.posargs, env=ONE_THREAD)


def check_examples(session: nox.Session) -> None:
    session.run("pytest", "examples/tests", *session.posargs, env=ONE_THREAD)


def check_snippets(session: nox.Session) -> None:
    session.run("pytest", "docs/tests", *session.posargs, env=ONE_THREAD)


# Sessions


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small language model, split over two processes of this machine."""
    install_groups(session, "examples")
    install_packages(session, "smp-common", "smp-torch", editable=True)
    example = "examples/torch/train_lm.py"
    session.run("smprun", "-n", "2", example, *session.posargs, env=ONE_THREAD)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every check that needs no GPU, as CI does, in one environment."""
    install_groups(session, "all")
    check_lint(session)
    install_packages(session, *PACKAGES)
    check_types(session)
    check_imports(session)
    check_units(session, *PACKAGES)
    if having("multiproc"):
        check_processes(session, *PACKAGES)
    check_examples(session)
    check_snippets(session)
    check_docs(session)
    check_builds(session)


@nox.session
@nox.parametrize("package", having("unit"))
def unit(session: nox.Session, package: str) -> None:
    """Run the unit tests of one package."""
    install_groups(session, "test")
    install_packages(session, *with_common(package))
    check_units(session, package)


@nox.session
@nox.parametrize("package", having("multiproc"))
def multiproc(session: nox.Session, package: str) -> None:
    """Run the tests of one package that start several processes."""
    install_groups(session, "test")
    install_packages(session, *with_common(package))
    check_processes(session, package)


@nox.session
def architectures(session: nox.Session) -> None:
    """Survey Transformers: which architectures give the numbers of one process?"""
    install_groups(session, "test", "architectures")
    install_packages(session, "smp-common", "smp-torch")
    tool = "packages/smp-torch/tests/architectures"
    session.run("python", tool, *session.posargs, env=ONE_THREAD)


@nox.session
def trainer(session: nox.Session) -> None:
    """Train with the Trainer of Transformers 4, over two partitions and in one process."""
    install_groups(session, "test", "trainer")
    install_packages(session, "smp-common", "smp-torch")
    test = "packages/smp-torch/tests/multiproc/test_trainer.py"
    session.run("pytest", test, *session.posargs, env=ONE_THREAD)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    install_groups(session, "lint")
    check_lint(session)


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types, strictly."""
    install_groups(session, "typecheck")
    install_packages(session, *PACKAGES)
    check_types(session)


@nox.session
def imports(session: nox.Session) -> None:
    """Check that imports go down only."""
    install_groups(session, "imports")
    # The check reads the files and imports nothing, so nothing else is needed.
    session.install("--no-deps", *(f"./packages/{name}" for name in PACKAGES))
    check_imports(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; warnings are errors."""
    install_groups(session, "docs")
    install_packages(session, "smp-common", "smp-torch")
    check_docs(session)


@nox.session
def snippets(session: nox.Session) -> None:
    """Run what the documentation shows, and compare what it prints."""
    install_groups(session, "test")
    install_packages(session, "smp-common", "smp-torch")
    check_snippets(session)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels and sdists, and import them from clean environments."""
    install_groups(session, "build")
    # The clean environments borrow what the packages need from this one.
    install_packages(session, *PACKAGES)
    check_builds(session)


@nox.session
@nox.parametrize("package", having("unit"))
def minimums(session: nox.Session, package: str) -> None:
    """Run the unit tests with the lowest versions that a package declares."""
    install_groups(session, "test")
    packages = with_common(package)
    if package == "smp-torch":
        install_torch(session, "2.11.0")
    pins = [pin for name in packages for pin in lowest(name)]
    session.install(*pins, *(f"./packages/{name}" for name in packages))
    check_units(session, package)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need CUDA devices, and on devices those that can use them."""
    install_groups(session, "test")
    install_packages(session, "smp-common", "smp-torch")
    names = ("gpu", "equality", "gradients", "checkpoint", "state", "scripts")
    files = [f"packages/smp-torch/tests/multiproc/test_{name}.py" for name in names]
    session.run("pytest", *files, *session.posargs, env=ONE_THREAD)
