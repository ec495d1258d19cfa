"""What one does with this repository; ``nox --list`` shows it.

A check is a plain function that runs in an environment which has what it needs. A session makes
the environment of one check; ``tests`` makes one environment for all of them. (A long file, since a
session is found here or nowhere.)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
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
#: Where the examples of a package are.
EXAMPLES = {"smp-torch": "torch", "smp-tf": "tensorflow"}
#: Many processes share few cores: threads of their own would hold them up.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
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
#: optimizers that Keras 3 lacks. Session ``tensorflow`` runs everything.
KERAS_2_SMOKE = (
    *("packages/smp-tf/tests/unit", "packages/smp-tf/tests/multiproc"),
    *("-k", "unit or pp2-cnn or pp2-lstm or pp2-zigzag or legacy or get_gradients"),
)
#: Tests of these kinds start processes.
PROCESSES = ("multiproc", "architectures", "failures")


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


def suites(kind: str, packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Returns the directories of the tests of this kind; packages without any have none."""
    places = (f"packages/{name}/tests/{kind}" for name in packages)
    return [place for place in places if (ROOT / place).is_dir()]


def having(kind: str) -> list[str]:
    """Returns the packages that have tests of this kind."""
    return [name for name in PACKAGES if suites(kind, (name,))]


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


def check_lint(session: nox.Session) -> None:
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


def check_house(session: Runner) -> None:
    session.run("pytest", "tools/tests", *session.posargs)


def check_units(session: Runner, *packages: str) -> None:
    # Apart: what collects garbage in tests of PyTorch need not look at TensorFlow's objects.
    for place in suites("unit", packages):
        session.run("pytest", "-m", "not slow", place, *session.posargs, env=ONE_THREAD)


def check_processes(
    session: Runner,
    *packages: str,
    which: str = "multiproc and not slow",
    kinds: tuple[str, ...] = PROCESSES,
) -> None:
    places = [place for kind in kinds for place in suites(kind, packages)]
    session.run("pytest", "-m", which, LONGEST, *places, *session.posargs, env=ONE_THREAD)


def check_examples(session: Runner) -> None:
    words = ("-m", "not slow", LONGEST, "examples/tests", *session.posargs)
    session.run("pytest", *words, env=ONE_THREAD)


def check_snippets(session: Runner, *words: str) -> None:
    session.run("pytest", *words, LONGEST, "docs/tests", *session.posargs, env=ONE_THREAD)


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
    check_processes(session, "smp-torch", kinds=("multiproc",))
    check_in_setting(session, "other-maker", *OTHER_MAKER_SMOKE)


def check_with_tensorflow(session: Runner) -> None:
    """The other lane, of the same length: what starts TensorFlow, or one process."""
    check_types(session)
    check_imports(session)
    check_units(session, *PACKAGES)
    session.run("pytest", "tools/tests", "conformance/tests", *session.posargs)
    # Without the navigation that the site's theme puts into each page, which warns of nothing.
    check_docs(session, "-D", "html_theme=basic")
    check_builds(session, "-m", "not slow")
    check_processes(session, "smp-tf")
    # Last, since every process of TensorFlow would import some of it.
    install_groups(session, "examples")
    check_examples(session)


def check_the_rest(session: Runner) -> None:
    """A third lane: conformance, Keras 2 in an environment of its own, and the documentation's.

    Launchers, jobs and failures too, whose tests mostly wait.
    """
    # First, before the other lane installs what processes of TensorFlow would import.
    check_conformance(session, "tensorflow", "--quick")
    session.run(sys.executable, "-m", "nox", "-s", "keras2", external=True)
    check_conformance(session, "torch", "--quick")
    check_snippets(session, "-m", "not slow")
    check_processes(session, "smp-common", "smp-launch")
    check_processes(session, "smp-torch", kinds=("architectures", "failures"))


# Sessions


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
    session.log("style, types, imports:    nox -r -s lint typecheck imports")


@nox.session(name="whole-examples")
@nox.parametrize("package", ["smp-torch", "smp-tf"])
def whole_examples(session: nox.Session, package: str) -> None:
    """Run the examples of a package to their ends, installed and started as they say."""
    install_for_examples(session, package)
    for script in sorted((ROOT / "examples" / EXAMPLES[package]).glob("*.py")):
        folder = str(Path(session.create_tmp(), script.stem))
        shutil.rmtree(folder, ignore_errors=True)  # what another run has left is gone on with
        words = (str(script), "--folder", folder, *session.posargs)
        session.run("smprun", "-n", "2", *words, env=ONE_THREAD)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every kind of check that needs no GPU, as CI does; releases run the slow ones too."""
    install_groups(session, "all")
    check_lint(session)
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
def setting(session: nox.Session) -> None:
    """Run the quick tests in a setting by name; words after it go to pytest in their place."""
    name, *words = session.posargs or [""]
    if name not in SETTINGS:
        session.error(f"-- is followed by one of {', '.join(SETTINGS)}; received {name!r}")
    install_groups(session, "test", "architectures")
    install_packages(session, *PACKAGES)
    if name == "locale":
        os.umask(0o077)
        if "tr_TR.utf8" not in str(session.run("locale", "-a", external=True, silent=True)):
            session.warn("The locale tr_TR.UTF-8 is not installed here: C takes its place.")
    # Apart, as in CI: what one framework imports is in the way of the other's compiler.
    places = [[each] for kind in ("unit", *PROCESSES) for each in suites(kind)]
    for each in [words] if words else places:
        check_in_setting(session, name, *each)


@nox.session
def examples(session: nox.Session) -> None:
    """Run the examples, as far as they take seconds; ``-- -m slow`` runs what takes longer."""
    install_groups(session, "test", "examples", "adapters")
    install_packages(session, *PACKAGES)
    check_examples(session)


@nox.session(python=nox.project.python_versions(metadata("smp-torch")))
@nox.parametrize("torch", TORCHES)
def compatibility(session: nox.Session, torch: str) -> None:
    """Run the tests of smp-torch on each Python and with each PyTorch that it claims."""
    install_groups(session, "test")
    install_torch(session, torch)
    session.install("./packages/smp-common", "./packages/smp-torch")
    check_units(session, "smp-torch")
    check_processes(session, "smp-torch")


@nox.session
def failures(session: nox.Session) -> None:
    """Run the whole failure matrix, of which CI runs a few cells."""
    install_groups(session, "test")
    install_packages(session, *PACKAGES)
    session.run("pytest", *suites("failures"), *session.posargs, env=ONE_THREAD)


@nox.session
def slurm(session: nox.Session) -> None:
    """Run smprun and jobs under a real Slurm on this host; needs root, slurm-wlm and munge."""
    install_groups(session, "test", "services", "serving", "architectures")
    install_packages(session, "smp-common", "smp-torch", "smp-launch")
    session.run("pytest", *suites("slurm"), *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("sdk", ["2", "3"])
def launch(session: nox.Session, sdk: str) -> None:
    """Try smp-launch with real programs around it: toolkit, SDK, boto3, an object store."""
    if sdk == "2":
        install_groups(session, "test", "services")
        install_packages(session, "smp-common", "smp-launch")
        session.run("pytest", *suites("services"), *session.posargs, env=ONE_THREAD)
    else:
        install_groups(session, "test", "services-3")
        install_packages(session, "smp-common", "smp-torch", "smp-launch")
        session.run("pytest", *suites("sdk3"), *session.posargs, env=ONE_THREAD)


@nox.session
def serve(session: nox.Session) -> None:
    """Serve models by KServe, and run one notebook by both doors of smp-launch."""
    install_groups(session, "test", "services", "serving")
    install_packages(session, *PACKAGES)
    session.run("pytest", *suites("serving"), *session.posargs, env=ONE_THREAD)
    for framework in ("torch", "tensorflow"):
        check_conformance(session, framework, "--only", "a_model_is_served")


@nox.session
def fresh(session: nox.Session) -> None:
    """Install as the documentation says, with pip, and run one notebook by both doors."""
    install_groups(session, "test")
    install_packages(session, "smp-common")
    session.run("pytest", *suites("fresh"), *session.posargs)


@nox.session
def thorough(session: nox.Session) -> None:
    """Run the slow tests, which CI leaves out, but for the failure matrix and packaging."""
    install_groups(session, "test", "architectures", "examples")
    install_packages(session, *PACKAGES)
    kinds = ("unit", "multiproc", "architectures")
    places = (*(place for kind in kinds for place in suites(kind)), "examples/tests")
    session.run("pytest", "-m", "slow", LONGEST, *places, *session.posargs, env=ONE_THREAD)


@nox.session
def architectures(session: nox.Session) -> None:
    """Survey Transformers: which architectures give the numbers of one process?"""
    install_groups(session, "test", "architectures")
    install_packages(session, "smp-common", "smp-torch")
    tool = "packages/smp-torch/tests/architectures"
    session.run("python", tool, *session.posargs, env=ONE_THREAD)


@nox.session
def population(session: nox.Session) -> None:
    """Train a population of Keras models: which give the numbers of TensorFlow alone?"""
    install_groups(session, "test")
    install_packages(session, "smp-common", "smp-tf")
    session.run("python", "packages/smp-tf/tests/population", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("release", ["4.57.*", "5.*"])
def trainer(session: nox.Session, release: str) -> None:
    """Train with the Trainer of Transformers, over two partitions and in one process."""
    install_groups(session, "test", "trainer")
    install_packages(session, "smp-common", "smp-torch")
    session.install(f"transformers=={release}")
    test = "packages/smp-torch/tests/multiproc/test_trainer.py"
    session.run("pytest", test, *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("release", ["4.24.0", "4.57.*", "5.*"])
def families(session: nox.Session, release: str) -> None:
    """Translate the families of Transformers, as published scripts pin it and as it is now."""
    install_groups(session, "test")
    install_packages(session, "smp-common", "smp-torch")
    session.install(f"transformers=={release}", "numpy<2")
    test = "packages/smp-torch/tests/multiproc/test_tensor_parallel.py"
    session.run("pytest", test, "-k", "transformers", *session.posargs, env=ONE_THREAD)


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
    """Build the documentation, and run its notebooks; warnings and cells that fail are errors."""
    install_groups(session, "docs", "serving")
    install_packages(session, *PACKAGES)
    check_docs(session, SMP_RUN_NOTEBOOKS="1")


@nox.session
def site(session: nox.Session) -> None:
    """Click through the documentation in a browser: answers, widths, tables and links."""
    install_groups(session, "docs", "test", "site")
    install_packages(session, *PACKAGES)
    check_docs(session)
    if shutil.which("chromium") is None:
        session.run("playwright", "install", "--only-shell", "chromium")
    session.run("pytest", "docs/tests/test_site.py", *session.posargs)


@nox.session
def house(session: nox.Session) -> None:
    """Test what releases and workflows rest on: tags, changelogs, public names, versions."""
    install_groups(session, "house")
    install_packages(session, *PACKAGES)
    check_house(session)


@nox.session
def names(session: nox.Session) -> None:
    """Record public names that appeared or are gone: PACKAGE, and the fragments that say so."""
    install_packages(session, *PACKAGES, editable=True)
    session.run("python", "tools/public_names.py", *session.posargs)


@nox.session
def changelog(session: nox.Session) -> None:
    """Show what the changelogs will say of the changes since the last releases."""
    install_groups(session, "release")
    session.run("python", "tools/release.py", "--draft")


@nox.session
def release(session: nox.Session) -> None:
    """Release a package: PACKAGE and its new VERSION. Commits and tags, pushes nothing."""
    install_groups(session, "release")
    session.run("python", "tools/release.py", *session.posargs)


@nox.session
def snippets(session: nox.Session) -> None:
    """Run what the documentation shows, and compare what it prints."""
    install_groups(session, "test")
    install_packages(session, *PACKAGES)
    check_snippets(session)


@nox.session(name="conformance-torch")
def conformance_torch(session: nox.Session) -> None:
    """Try smp-torch against every row of the specification; words after -- go to the runner."""
    install_groups(session, "test", "serving")
    install_packages(session, "smp-common", "smp-torch", "smp-launch")
    check_conformance(session, "torch", *session.posargs)


@nox.session(name="conformance-tf")
def conformance_tf(session: nox.Session) -> None:
    """Try smp-tf against every row of the specification; words after -- go to the runner."""
    install_groups(session, "test", "serving")
    install_packages(session, "smp-common", "smp-tf", "smp-launch")
    check_conformance(session, "tensorflow", *session.posargs)


@nox.session
@nox.parametrize("framework", ("torch", "tensorflow"))
def mutations(session: nox.Session, framework: str) -> None:
    """Break a package on purpose, in many ways, and hold that conformance notices each."""
    install_groups(session, "test")
    install_packages(session, *PACKAGES)
    command = ("python", "-m", "conformance.mutations", "--framework", framework)
    session.run(*command, *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("framework", ("torch", "tensorflow"))
def mutants(session: nox.Session, framework: str) -> None:
    """Break a sample of lines as a machine would, and count what the suite notices; hours."""
    install_groups(session, "mutants")
    install_packages(session, *PACKAGES)
    command = ("python", "-m", "conformance.mutants", "--framework", framework)
    session.run(*command, *session.posargs, env=ONE_THREAD)


# TensorFlow 2.15 has no wheels for newer Pythons.
@nox.session(python="3.11")
@nox.parametrize("tensorflow", TENSORFLOWS)
def tensorflow(session: nox.Session, tensorflow: str) -> None:
    """Run all tests of smp-tf with the last TensorFlow that has Keras 2, and the newest."""
    install_tensorflow(session, tensorflow)
    check_units(session, "smp-tf")
    check_processes(session, "smp-tf", which="multiproc")


@nox.session(python="3.11")
def keras2(session: nox.Session) -> None:
    """Run the unit tests of smp-tf and some of its others with the last TensorFlow on Keras 2."""
    install_tensorflow(session, TENSORFLOWS[0])
    session.run("pytest", LONGEST, *KERAS_2_SMOKE, env=ONE_THREAD)


@nox.session(python="3.11")
@nox.parametrize("tensorflow", TENSORFLOWS)
def horovod(session: nox.Session, tensorflow: str) -> None:
    """Make Horovod's wheel for each TensorFlow, once, and train with it on four processes."""
    install_tensorflow(session, tensorflow)
    install_pip(session)
    session.run("python", "tools/build_horovod.py", "--install")
    places = suites("horovod", ("smp-tf",))
    session.run("pytest", *places, *session.posargs, env=ONE_THREAD)
    # Every model in every way, which takes a quarter of an hour.
    equality = "packages/smp-tf/tests/multiproc/test_tf_equality.py"
    session.run("pytest", equality, *session.posargs, env=ONE_THREAD)


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
    """Run the tests with the lowest versions that a package declares."""
    install_groups(session, "test")
    packages = with_common(package)
    if package == "smp-torch":
        install_torch(session, TORCHES[0])
    pins = [pin for name in packages for pin in lowest(name)]
    session.install(*pins, *(f"./packages/{name}" for name in packages))
    check_units(session, package)
    if package in having("multiproc"):
        check_processes(session, package)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need CUDA devices, and on devices those that can use them."""
    install_groups(session, "test")
    install_packages(session, "smp-common", "smp-torch")
    names = [
        *("gpu", "equality", "gradients", "checkpoint", "state", "scripts", "population"),
        *("cuda_graphs", "compiled", "pass_times"),
    ]
    files = [f"packages/smp-torch/tests/multiproc/test_{name}.py" for name in names]
    session.run("pytest", "-m", "not slow", *files, *session.posargs, env=ONE_THREAD)


@nox.session(name="gpu-tf")
def gpu_tensorflow(session: nox.Session) -> None:
    """Run on CUDA devices those tests of smp-tf that can use them, as far as there are enough."""
    install_groups(session, "test")
    session.install("tensorflow[and-cuda]", "./packages/smp-common", "./packages/smp-tf")
    names = ("equality", "checkpoints", "optimizers")
    files = [f"packages/smp-tf/tests/multiproc/test_tf_{name}.py" for name in names]
    places = suites("failures", ("smp-tf",))
    session.run("pytest", *files, *places, *session.posargs, env=ONE_THREAD)
