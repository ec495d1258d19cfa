"""What one does with this repository; ``nox --list`` shows it.

A check is a plain function that runs in an environment which has what it needs; ``tests`` makes one
environment for all of them. Other sessions have parts, and run the one that the first word after
``--`` names: a part makes the environment of one check. (A long file, since what one can run is
found here or nowhere.)
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.10.14"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = True
# uv installs in a fraction of pip's time. Like pip it shall trust what the machine trusts, and no
# Python comes that nobody asked for.
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
os.environ.setdefault("UV_SYSTEM_CERTS", "1")
nox.options.error_on_external_run = True
# Environments are new, and hundreds of processes import from them: what one compiles, others read.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
PACKAGES = ("smp-common", "smp-torch", "smp-tf", "smp-launch")
SOURCES = (
    *("packages", "conformance", "tools", "examples", "docs", "benchmarks"),
    "noxfile.py",
)
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: The releases of PyTorch that smp-torch claims to work with, the lowest first.
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")
#: The releases of TensorFlow that Horovod's wheel is made for: with Keras 2 and with Keras 3.
TENSORFLOWS = ("2.15.1", "2.21.0")
#: What works with which framework; examples have its name too.
PACKAGE_OF = {"torch": "smp-torch", "tensorflow": "smp-tf"}
#: Many processes share few cores: threads of their own would hold them up.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: For tests that may take longer than those of CI: TensorFlow traces each microbatch.
MORE_MICROBATCHES = {**ONE_THREAD, "TF_TESTS_MICROBATCHES": "4"}
#: What machines differ in, by name: nothing may depend on it.
SETTINGS = {
    # The arithmetic of another maker's processor, as far as the libraries below can be told to.
    "other-maker": {
        "MKL_CBWR": "COMPATIBLE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    # That of a processor without vectors.
    "plain": {"ATEN_CPU_CAPABILITY": "default"},
    # Each process has another order of sets; none is the copy of another then.
    "hashes": {"PYTHONHASHSEED": "random"},
    # Numbers have commas and i has a dot in what is written in C; other users see no files, and
    # the folder for temporary ones has an unusual name.
    "locale": {"LC_ALL": "tr_TR.UTF-8", "TMPDIR": "größerer Ort"},
    "threads": {"OMP_NUM_THREADS": "4"},
}
#: What CI runs in a setting that is not the machine's own: proofs of slices, which compare numbers.
OTHER_MAKER_SMOKE = (
    "packages/smp-torch/tests/unit/tensor_parallel/test_proof.py",
    "packages/smp-torch/tests/multiproc/test_auto.py",
    *("-k", "test_proof or qwen3"),
)
#: Where pytest runs long, it says what took longest.
LONGEST = "--durations=40"
#: What the older TensorFlow is tried with in CI: state, loops, several segments a partition, and
#: optimizers that Keras 3 lacks. Part ``all`` of session ``tensorflow`` runs everything.
KERAS_2_SMOKE = (
    *("packages/smp-tf/tests/unit", "packages/smp-tf/tests/multiproc"),
    *("-k", "unit or pp2-cnn or pp2-lstm or pp2-zigzag or legacy or get_gradients"),
    *("-m", "multiproc or not slow"),  # of units what every run tries
)
#: Files of tests that can use CUDA devices, as far as there are enough.
ON_DEVICES = {
    "torch": (
        *("gpu", "equality", "gradients", "checkpoint", "state", "scripts", "population"),
        *("cuda_graphs", "compiled", "pass_times"),
    ),
    "tensorflow": ("tf_equality", "tf_checkpoints", "tf_optimizers"),
}
#: Files of tests that start processes of PyTorch and that the third lane of ``tests`` runs, not the
#: first: lanes are to take as long as each other. No other lane has some, since each run of pytest
#: imports PyTorch twice, to collect and for the process that is copied (18 s of a processor).
IN_THIRD_LANE = tuple(
    f"packages/smp-torch/tests/multiproc/test_{name}.py"
    for name in ("experts", "context_parallel", "plan", "restarts", "formats")
)
#: Tests of these kinds start processes.
PROCESSES = ("multiproc", "architectures", "failures")


#: What a session can be asked for by name, see `part`.
PARTS: dict[str, dict[str, Callable[..., None]]] = {}


class Quiet:
    """A session that shows what a command said when it has ended, for commands beside others."""

    def __init__(self, session: nox.Session) -> None:
        self._session = session
        self.posargs = session.posargs
        self.log = session.log
        self.install = session.install
        self.run_install = session.run_install

    def run(self, *words: str, **options: Any) -> None:
        print(self._session.run(*words, silent=True, **options), flush=True)


Runner = nox.Session | Quiet


# Parts


def part(session: str, name: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a part of a session, by its own name or this one.

    The part receives the session, the words that follow its name and the parameters of the session.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        PARTS.setdefault(session, {})[name or function.__name__] = function
        return function

    return register


def run_parts(session: nox.Session, of: str, *unasked: str, **parameters: Any) -> None:
    """Runs the part that the first word after -- names, or these where it is none but an option."""
    name, *words = session.posargs or [""]
    parts = PARTS[of]
    chosen: Sequence[str] = [name]
    if unasked and (not name or name.startswith("-")):
        chosen, words = unasked, list(session.posargs)
    elif name not in parts:
        told = "".join(f"\n  {each}: {does.__doc__}" for each, does in parts.items())
        session.error(f"nox -s {of} -- is followed by one of these; received {name!r}:{told[:-1]}")
    for each in chosen:
        kinds = {taken.kind for taken in inspect.signature(parts[each]).parameters.values()}
        if words and inspect.Parameter.VAR_POSITIONAL not in kinds:
            session.error(f"{each} takes no words; received {' '.join(words)!r}: leave them out")
        parts[each](session, *words, **parameters)


def one_or_all(
    session: nox.Session, words: Sequence[str], known: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the version that the first word names, or all, and the words after it."""
    if not words or words[0].startswith("-"):
        return known, words
    if words[0] not in known:
        session.error(f"A version is one of {', '.join(known)}; received {words[0]!r}")
    return words[:1], words[1:]


# Environments


def install_groups(session: Runner, *groups: str) -> None:
    """Installs dependency groups of the root pyproject.toml."""
    session.install(*nox.project.dependency_groups(GROUPS, *groups))


def install_pip(session: Runner) -> None:
    """Installs pip, which uv leaves out and tools of the house call."""
    session.install("pip")


def install_torch(session: Runner, *version: str) -> None:
    """Installs PyTorch, the CPU build where no GPU is; see tools/install_torch.py."""
    install_pip(session)
    session.run_install("python", "tools/install_torch.py", *version)


def prepare(session: nox.Session, *groups: str, packages: Sequence[str] = PACKAGES) -> None:
    """Installs dependency groups and packages of this repository."""
    install_groups(session, *groups)
    install_packages(session, *packages)


def install_tensorflow(session: nox.Session, version: str) -> None:
    """Installs smp-tf with this TensorFlow, and what its tests need."""
    install_groups(session, "test")
    session.install(f"tensorflow=={version}", "./packages/smp-common", "./packages/smp-tf")


def install_packages(session: Runner, *packages: str, editable: bool = False) -> None:
    """Installs packages of this repository and what they need.

    In one pip call, so that pip takes smp-common from here and not from the registry.
    """
    if "smp-torch" in packages:
        install_torch(session)
    flag = ["--editable"] if editable else []
    session.install(*(word for name in packages for word in (*flag, f"./packages/{name}")))


def install_for_examples(session: Runner, package: str) -> None:
    """Installs a package with what its examples import besides."""
    install_packages(session, *with_common(package), editable=True)
    session.install("--editable", f"./packages/{package}[examples]")


def with_common(package: str) -> tuple[str, ...]:
    """Returns the packages to install for the tests of one."""
    return tuple(dict.fromkeys(("smp-common", package)))


def suites(kind: str, packages: Sequence[str] = PACKAGES) -> list[str]:
    """Returns the directories of the tests of this kind; packages without any have none."""
    places = (f"packages/{name}/tests/{kind}" for name in packages)
    return [place for place in places if (ROOT / place).is_dir()]


def metadata(package: str) -> dict[str, Any]:
    """Returns what the pyproject.toml of a package says."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def lowest(package: str) -> list[str]:
    """Returns the lowest versions that a package declares of what it needs, PyTorch aside."""
    needed = [Requirement(text) for text in metadata(package)["project"]["dependencies"]]
    return [
        f"{need.name}=={bound.version}"
        for need in needed
        if need.name not in (*PACKAGES, "torch")
        for bound in need.specifier
        if bound.operator == ">="
    ]


# Checks


def run_tests(session: Runner, *words: str, env: Mapping[str, str] = ONE_THREAD) -> None:
    session.run("pytest", *words, env=env)


def check_style(session: Runner) -> None:
    present = [place for place in SOURCES if (ROOT / place).exists()]
    session.run("ruff", "check", *present)
    session.run("ruff", "format", "--check", *present)
    for schema, pattern in (("workflows", "workflows/*.yml"), ("actions", "actions/*/action.yml")):
        files = (str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(f".github/{pattern}")))
        session.run("check-jsonschema", "-q", "--builtin-schema", f"vendor.github-{schema}", *files)


def check_types(session: Runner) -> None:
    leaves = ("backend", "common", "torch", "tensorflow", "launch")
    session.run(
        "mypy", *(w for leaf in leaves for w in ("-p", f"smdistributed.modelparallel.{leaf}"))
    )
    tools = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*.py"))
    session.run("mypy", "noxfile.py", *tools)


def check_imports(session: Runner) -> None:
    session.run("lint-imports", "--no-cache")


def check_docs(session: Runner, *words: str, **variables: str) -> None:
    shutil.rmtree(ROOT / "docs/_build", ignore_errors=True)
    command = ("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", *words)
    session.run(*command, "docs", "docs/_build/html", env={**ONE_THREAD, **variables})
    session.log("open docs/_build/html/index.html")


def check_builds(session: Runner, *words: str) -> None:
    session.run("pytest", *words, *suites("packaging"))


def check_units(session: Runner, packages: Sequence[str], *words: str) -> None:
    # Apart: what collects garbage in tests of PyTorch need not look at TensorFlow's objects.
    for place in suites("unit", packages):
        run_tests(session, "-m", "not slow", place, *words)


def check_processes(
    session: Runner,
    packages: Sequence[str],
    *words: str,
    which: str = "multiproc and not slow",
    kinds: tuple[str, ...] = PROCESSES,
    env: Mapping[str, str] = ONE_THREAD,
) -> None:
    places = [place for kind in kinds for place in suites(kind, packages)]
    run_tests(session, "-m", which, LONGEST, *places, *words, env=env)


def check_examples(session: Runner, *words: str) -> None:
    run_tests(session, "-m", "not slow", LONGEST, "examples/tests", *words)


def check_snippets(session: Runner, *words: str) -> None:
    run_tests(session, LONGEST, "docs/tests", *words)


def check_conformance(session: Runner, framework: str, *words: str) -> None:
    command = ("python", "-m", "conformance", "--framework", framework)
    session.run(*command, *words, env=ONE_THREAD)


def check_in_setting(session: Runner, name: str, *words: str) -> None:
    variables = {**ONE_THREAD, **SETTINGS[name]}
    with tempfile.TemporaryDirectory() as folder:
        # PyTorch takes what it has compiled for other vectors: numbers are wrong then.
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "compiled"))
        if temporary := variables.get("TMPDIR"):
            variables["TMPDIR"] = str(Path(folder, temporary))
            Path(variables["TMPDIR"]).mkdir()
        session.run("pytest", "-m", "not slow", *words, env=variables)


def check_with_torch(session: Runner) -> None:
    """One lane of ``tests``: what starts processes of PyTorch."""
    elsewhere = (f"--ignore={place}" for place in IN_THIRD_LANE)
    check_processes(session, ["smp-torch"], *elsewhere, *session.posargs, kinds=("multiproc",))
    check_in_setting(session, "other-maker", *OTHER_MAKER_SMOKE)


def check_with_tensorflow(session: Runner) -> None:
    """A second lane: what starts TensorFlow, or one process."""
    words = session.posargs
    check_types(session)
    check_imports(session)
    check_units(session, PACKAGES, *words)
    session.run("pytest", "tools/tests", "conformance/tests", *words)
    # Without the navigation that the site's theme puts into each page, which warns of nothing.
    check_docs(session, "-D", "html_theme=basic")
    check_builds(session, "-m", "not slow")
    check_processes(session, ["smp-tf"], *words)
    # Last, since every process of TensorFlow would import some of it.
    install_groups(session, "examples")
    check_examples(session, *words)


def check_the_rest(session: Runner) -> None:
    """A third lane: conformance, Keras 2 in an environment of its own, and the documentation's.

    Launchers, jobs and failures too, whose tests mostly wait.
    """
    words = session.posargs
    # First, before the other lane installs what processes of TensorFlow would import.
    check_conformance(session, "tensorflow", "--quick")
    keras_2 = ("-m", "nox", "-s", f"tensorflow({TENSORFLOWS[0]})", "--", "some")
    session.run(sys.executable, *keras_2, external=True)
    check_conformance(session, "torch", "--quick")
    check_snippets(session, "-m", "not slow", *words)
    check_processes(session, ["smp-common", "smp-launch"], *words)
    kinds = ("architectures", "failures")
    check_processes(session, ["smp-torch"], *IN_THIRD_LANE, *words, kinds=kinds)


# To begin with


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small language model, split over two processes of this machine."""
    install_for_examples(session, "smp-torch")
    # A third of the example's own steps shows how the loss falls; words after -- may ask for more.
    words = ("examples/torch/train_lm.py", "--steps", "100", *session.posargs)
    session.run("smprun", "-n", "2", *words, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def dev(session: nox.Session) -> None:
    """Make an environment to work in: the packages, editable, and the tools of the checks."""
    install_groups(session, "dev")
    install_packages(session, *PACKAGES, editable=True)
    place = Path(session.bin).relative_to(ROOT)
    tests = f"{place}/pytest packages/smp-torch/tests"
    session.log(f"a unit test:              {tests}/unit/checkpoint/test_layout.py")
    session.log(f"one of several processes: {tests}/multiproc/test_scripts.py -m 'not slow'")
    session.log("style, types, imports:    nox -s lint")


@nox.session
def tests(session: nox.Session) -> None:
    """Run every kind of check that needs no GPU, as CI does; releases run the slow ones too."""
    install_groups(session, "all")
    check_style(session)
    install_packages(session, *PACKAGES)
    # Lanes: ranks often wait for each other, and then another lane computes.
    with ThreadPoolExecutor() as beside:
        others = [
            beside.submit(check, Quiet(session))
            for check in (check_with_tensorflow, check_the_rest)
        ]
        check_with_torch(session)
        for other in others:
            other.result()


# The files as they are


@nox.session
def lint(session: nox.Session) -> None:
    """Check the files, all or `-- style`, `types`, `imports` or `house`."""
    run_parts(session, "lint", "style", "types", "imports", "house")


@part("lint")
def style(session: nox.Session) -> None:
    """Check style and formatting."""
    install_groups(session, "lint")
    check_style(session)


@part("lint")
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    # With what is imported where it is there: pytest, safetensors.
    prepare(session, "typecheck", "test", "architectures")
    check_types(session)


@part("lint")
def imports(session: nox.Session) -> None:
    """Check that imports go down only."""
    install_groups(session, "imports")
    # The check reads the files and imports nothing, so nothing else is needed.
    session.install("--no-deps", *(f"./packages/{name}" for name in PACKAGES))
    check_imports(session)


@part("lint")
def house(session: nox.Session, *words: str) -> None:
    """Test what releases and workflows rest on: tags, changelogs, public names, versions."""
    prepare(session, "house")
    session.run("pytest", "tools/tests", *words)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; or `-- site`, `snippets` or `examples`: try what it shows."""
    run_parts(session, "docs", "pages")


@part("docs")
def pages(session: nox.Session) -> None:
    """Build the documentation, and run its notebooks; warnings and cells that fail are errors."""
    prepare(session, "docs", "serving")
    check_docs(session, SMP_RUN_NOTEBOOKS="1")


@part("docs")
def site(session: nox.Session, *words: str) -> None:
    """Click through the documentation in a browser: answers, widths, tables and links."""
    prepare(session, "docs", "test", "site")
    check_docs(session)
    if shutil.which("chromium") is None:
        session.run("playwright", "install", "--only-shell", "chromium")
    session.run("pytest", "docs/tests/test_site.py", *words)


@part("docs")
def snippets(session: nox.Session, *words: str) -> None:
    """Run what the documentation shows, and compare what it prints."""
    prepare(session, "test")
    check_snippets(session, *words)


@part("docs")
def examples(session: nox.Session, *words: str) -> None:
    """Run the examples, as far as they take seconds; `-m slow` runs what takes longer."""
    prepare(session, "test", "examples", "adapters")
    check_examples(session, *words)


# Packages


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def package(session: nox.Session, package: str) -> None:
    """Run the tests of a package; or `-- unit`, `multiproc`, `minimums`, and two more."""
    run_parts(session, "package", "unit", "multiproc", package=package)


@part("package")
def unit(session: nox.Session, *words: str, package: str) -> None:
    """Run the unit tests."""
    prepare(session, "test", packages=with_common(package))
    check_units(session, [package], *words)


@part("package")
def multiproc(session: nox.Session, *words: str, package: str) -> None:
    """Run the tests that start several processes."""
    prepare(session, "test", packages=with_common(package))
    check_processes(session, [package], *words)


@part("package")
def minimums(session: nox.Session, *words: str, package: str) -> None:
    """Run both with the lowest versions that the package declares."""
    install_groups(session, "test")
    packages = with_common(package)
    if package == "smp-torch":
        install_torch(session, TORCHES[0])
    pins = [pin for name in packages for pin in lowest(name)]
    session.install(*pins, *(f"./packages/{name}" for name in packages))
    check_units(session, [package], *words)
    check_processes(session, [package], *words)


@part("package")
def compatibility(session: nox.Session, *words: str, package: str) -> None:
    """Run both of smp-torch with the PyTorch named next, such as 2.11.0, or each that it claims."""
    if package != "smp-torch":
        session.error(f"Only smp-torch has versions of PyTorch; received package({package})")
    versions, others = one_or_all(session, words, TORCHES)
    for version in versions:
        install_groups(session, "test")
        install_torch(session, version)
        session.install("./packages/smp-common", "./packages/smp-torch")
        check_units(session, [package], *others)
        check_processes(session, [package], *others)


@part("package", "whole-examples")
def whole_examples(session: nox.Session, *words: str, package: str) -> None:
    """Run the examples of a package to their ends, installed and started as they say."""
    folders = {name: framework for framework, name in PACKAGE_OF.items()}
    if package not in folders:
        session.error(f"Examples have {' and '.join(folders)}; received package({package})")
    install_for_examples(session, package)
    for script in sorted((ROOT / "examples" / folders[package]).glob("*.py")):
        folder = str(Path(session.create_tmp(), script.stem))
        shutil.rmtree(folder, ignore_errors=True)  # what another run has left is gone on with
        command = ("smprun", "-n", "2", str(script), "--folder", folder)
        session.run(*command, *words, env=ONE_THREAD)


# TensorFlow 2.15 has no wheels for newer Pythons.
@nox.session(python="3.11")
@nox.parametrize("version", TENSORFLOWS, ids=TENSORFLOWS)
def tensorflow(session: nox.Session, version: str) -> None:
    """Run all tests of smp-tf with Keras 2 and Keras 3, or `-- some`; or `-- horovod`."""
    run_parts(session, "tensorflow", "all", version=version)


@part("tensorflow", "all")
def all_with_tensorflow(session: nox.Session, *words: str, version: str) -> None:
    """Run all tests of smp-tf."""
    install_tensorflow(session, version)
    check_units(session, ["smp-tf"], *words)
    check_processes(session, ["smp-tf"], *words, which="multiproc", env=MORE_MICROBATCHES)


@part("tensorflow", "some")
def some_with_tensorflow(session: nox.Session, *words: str, version: str) -> None:
    """Run the unit tests and some of the others, as CI does with Keras 2."""
    install_tensorflow(session, version)
    run_tests(session, LONGEST, *KERAS_2_SMOKE, *words)


@part("tensorflow")
def horovod(session: nox.Session, *words: str, version: str) -> None:
    """Make Horovod's wheel, once, and train with it on four processes."""
    install_tensorflow(session, version)
    install_pip(session)
    session.run("python", "tools/build_horovod.py", "--install")
    run_tests(session, *suites("horovod", ("smp-tf",)), *words)
    # Every model in every way, which takes a quarter of an hour.
    run_tests(session, "packages/smp-tf/tests/multiproc/test_tf_equality.py", *words)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels and sdists, and import them from clean environments."""
    # The clean environments borrow what the packages need from this one.
    prepare(session, "build")
    check_builds(session, *session.posargs)


# The specification


@nox.session
@nox.parametrize("framework", [*PACKAGE_OF], ids=[*PACKAGE_OF])
def conformance(session: nox.Session, framework: str) -> None:
    """Try a package against every row of the specification; words after -- go to the runner."""
    packages = ("smp-common", PACKAGE_OF[framework], "smp-launch")
    prepare(session, "test", "serving", packages=packages)
    check_conformance(session, framework, *session.posargs)


@nox.session
@nox.parametrize("framework", [*PACKAGE_OF], ids=[*PACKAGE_OF])
def mutants(session: nox.Session, framework: str) -> None:
    """Break a package in the ways that `-- written` or `-- sampled` has; is it noticed?"""
    run_parts(session, "mutants", framework=framework)


@part("mutants")
def written(session: nox.Session, *words: str, framework: str) -> None:
    """Break a package on purpose, in many ways, and hold that conformance notices each."""
    prepare(session, "test")
    command = ("python", "-m", "conformance.mutations", "--framework", framework)
    session.run(*command, *words, env=ONE_THREAD)


@part("mutants")
def sampled(session: nox.Session, *words: str, framework: str) -> None:
    """Break a sample of lines as a machine would, and count what the suite notices; hours."""
    prepare(session, "mutants")
    command = ("python", "-m", "conformance.mutants", "--framework", framework)
    session.run(*command, *words, env=ONE_THREAD)


# What takes long, or needs what CI lacks


@nox.session
def long(session: nox.Session) -> None:
    """Run what CI leaves out, one of ten parts by name; without a name it says which there are."""
    run_parts(session, "long")


@part("long")
def failures(session: nox.Session, *words: str) -> None:
    """Run the whole failure matrix, of which CI runs a few cells."""
    prepare(session, "test")
    run_tests(session, *suites("failures"), *words)


@part("long")
def thorough(session: nox.Session, *words: str) -> None:
    """Run the slow tests, which CI leaves out, but for the failure matrix and packaging."""
    prepare(session, "test", "architectures", "examples")
    kinds = ("unit", "multiproc", "architectures")
    places = (*(place for kind in kinds for place in suites(kind)), "examples/tests")
    run_tests(session, "-m", "slow", LONGEST, *places, *words, env=MORE_MICROBATCHES)


@part("long")
def slurm(session: nox.Session, *words: str) -> None:
    """Run smprun and jobs under a real Slurm on this host; needs root, slurm-wlm and munge."""
    groups = ("test", "services", "serving", "architectures")
    prepare(session, *groups, packages=("smp-common", "smp-torch", "smp-launch"))
    run_tests(session, *suites("slurm"), *words)


@part("long")
def launch(session: nox.Session, *words: str) -> None:
    """Try smp-launch with real programs around it: toolkit, SDK of version 2, boto3, a store."""
    prepare(session, "test", "services", packages=("smp-common", "smp-launch"))
    run_tests(session, *suites("services"), *words)


@part("long")
def sdk3(session: nox.Session, *words: str) -> None:
    """Try smp-launch below the SDK of version 3, with jobs of smp-torch."""
    packages = ("smp-common", "smp-torch", "smp-launch")
    prepare(session, "test", "services-3", packages=packages)
    run_tests(session, *suites("sdk3"), *words)


@part("long")
def serve(session: nox.Session, *words: str) -> None:
    """Serve models by KServe, and run one notebook by both doors of smp-launch."""
    prepare(session, "test", "services", "serving")
    run_tests(session, *suites("serving"), *words)
    for framework in PACKAGE_OF:
        check_conformance(session, framework, "--only", "a_model_is_served")


@part("long")
def fresh(session: nox.Session, *words: str) -> None:
    """Install as the documentation says, with pip, and run one notebook by both doors."""
    prepare(session, "test", packages=["smp-common"])
    session.run("pytest", *suites("fresh"), *words)


@part("long")
def architectures(session: nox.Session, *words: str) -> None:
    """Survey Transformers: which architectures give the numbers of one process?"""
    prepare(session, "test", "architectures", packages=("smp-common", "smp-torch"))
    session.run("python", "packages/smp-torch/tests/architectures", *words, env=ONE_THREAD)


@part("long")
def population(session: nox.Session, *words: str) -> None:
    """Train a population of Keras models: which give the numbers of TensorFlow alone?"""
    prepare(session, "test", packages=("smp-common", "smp-tf"))
    session.run("python", "packages/smp-tf/tests/population", *words, env=MORE_MICROBATCHES)


@part("long")
def trainer(session: nox.Session, *words: str) -> None:
    """Train with the Trainer of Transformers, of the release named next or of each."""
    prepare(session, "test", "trainer", packages=("smp-common", "smp-torch"))
    releases, others = one_or_all(session, words, ("4.57.*", "5.*"))
    for release in releases:
        session.install(f"transformers=={release}")
        run_tests(session, "packages/smp-torch/tests/multiproc/test_trainer.py", *others)


@part("long")
def families(session: nox.Session, *words: str) -> None:
    """Translate the families of Transformers, of the release named next or of each."""
    prepare(session, "test", packages=("smp-common", "smp-torch"))
    test = "packages/smp-torch/tests/multiproc/test_tensor_parallel.py"
    # As published scripts pin it, and as it is now.
    releases, others = one_or_all(session, words, ("4.24.0", "4.57.*", "5.*"))
    for release in releases:
        session.install(f"transformers=={release}", "numpy<2")
        run_tests(session, test, "-k", "transformers", *others)


@nox.session
def setting(session: nox.Session) -> None:
    """Run the quick tests in a setting by name; words after it go to pytest in their place."""
    name, *words = session.posargs or [""]
    if name not in SETTINGS:
        session.error(f"-- is followed by one of {', '.join(SETTINGS)}; received {name!r}")
    prepare(session, "test", "architectures")
    if name == "locale":
        os.umask(0o077)
        if "tr_TR.utf8" not in str(session.run("locale", "-a", external=True, silent=True)):
            session.warn("The locale tr_TR.UTF-8 is not installed here: C takes its place.")
    # Apart, as in CI: what one framework imports is in the way of the other's compiler.
    places = [[each] for kind in ("unit", *PROCESSES) for each in suites(kind)]
    for each in [words] if words else places:
        check_in_setting(session, name, *each)


@nox.session
@nox.parametrize("framework", [*PACKAGE_OF], ids=[*PACKAGE_OF])
def gpu(session: nox.Session, framework: str) -> None:
    """Run the tests that need CUDA devices, and on devices those that can use them."""
    install_groups(session, "test")
    if framework == "torch":
        install_packages(session, "smp-common", "smp-torch")
        words = ["-m", "not slow"]
    else:
        session.install("tensorflow[and-cuda]", "./packages/smp-common", "./packages/smp-tf")
        words = suites("failures", ("smp-tf",))
    tests = f"packages/{PACKAGE_OF[framework]}/tests/multiproc"
    files = (f"{tests}/test_{name}.py" for name in ON_DEVICES[framework])
    run_tests(session, *files, *words, *session.posargs)


# Releases


@nox.session
def release(session: nox.Session) -> None:
    """Prepare a release by `-- changelog` or `names`, make it by `tag`, check it by `verify`."""
    run_parts(session, "release")


@part("release")
def changelog(session: nox.Session) -> None:
    """Show what the changelogs will say of the changes since the last releases."""
    install_groups(session, "release")
    session.run("python", "tools/release.py", "--draft")


@part("release")
def names(session: nox.Session, *words: str) -> None:
    """Record public names that appeared or are gone: PACKAGE, and the fragments that say so."""
    install_packages(session, *PACKAGES, editable=True)
    session.run("python", "tools/public_names.py", *words)


@part("release")
def tag(session: nox.Session, *words: str) -> None:
    """Release a package: PACKAGE and its new VERSION. Commits and tags, pushes nothing."""
    install_groups(session, "release")
    session.run("python", "tools/release.py", *words)


@part("release")
def verify(session: nox.Session, *words: str) -> None:
    """Check that this tree is what a TAG says."""
    install_groups(session, "release")
    session.run("python", "tools/release.py", "--verify", *words)
