"""What the workflows run is there, and covers what the packages claim."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import install_torch
import pytest
import yaml
from release import DEPENDENTS, PACKAGES, ROOT, parse_tag, tag_of

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
HOUSE = runpy.run_path(str(ROOT / "noxfile.py"))


def load(name: str) -> Any:
    # YAML 1.1 reads the key "on" as a boolean; GitHub does not.
    loaded = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    return {"on" if key is True else key: value for key, value in loaded.items()}


def matrices(job: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yields the values of a job's matrix, one dictionary a run of the job."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        yield dict(zip(matrix, values, strict=True))


def nox_calls(name: str) -> Iterator[list[str]]:
    """Yields the words of each call of nox that a workflow makes."""
    for job in load(name)["jobs"].values():
        for values, step in itertools.product(matrices(job), job.get("steps", ())):
            line = step.get("run", "")
            for key, value in values.items():
                line = line.replace(f"${{{{ matrix.{key} }}}}", value)
            words = shlex.split(line)
            if "nox" in words:
                assert words[0] == "nox", f"nox is a step of its own: {line}"
                yield words


def sessions(words: list[str]) -> list[str]:
    """Returns what follows -s in a call of nox, up to the next option."""
    after = words[words.index("-s") + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("-"), after))


def part(words: list[str]) -> str:
    """Returns the part that a call of nox asks for, if it does."""
    first = words[words.index("--") + 1] if "--" in words else ""
    return "" if first.startswith("-") else first


def unknown_parts(words: list[str]) -> list[str]:
    """Returns the part that a call of nox asks for, if one of its sessions has not got it."""
    asked, named = part(words), (each.partition("(")[0] for each in sessions(words))
    having = [HOUSE["PARTS"][name] for name in named if name in HOUSE["PARTS"]]
    return [asked for known in having if asked and asked not in known]


def work(name: str) -> set[str]:
    """Returns what a workflow runs: sessions, followed by the part where one is asked for."""
    return {
        f"{each} -- {part(words)}" if part(words) else each
        for words in nox_calls(name)
        for each in sessions(words)
    }


def nox(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nox", *words]
    # With CI set, nox is strict by itself.
    environment = {key: value for key, value in os.environ.items() if key != "CI"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The sessions, with and without their parameters."""
    names = re.findall(r"^[-*] (\S+)", nox("--list").stdout, re.MULTILINE)
    assert "tests" in names
    return {*names, *(name.partition("(")[0] for name in names)}


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_workflows_run_sessions_that_exist(name: str, known: set[str]) -> None:
    calls = list(nox_calls(name))
    assert calls, "nox runs what is to be run"
    unknown = [each for words in calls for each in sessions(words) if each not in known]
    assert not unknown, "noxfile.py has no such session"
    assert all(map(sessions, calls))
    assert not list(itertools.chain(*map(unknown_parts, calls))), "noxfile.py has no such part"


@pytest.mark.parametrize("call", ["long", "long -- nothing", "package(smp-torch) -- nothing"])
def test_an_unknown_part_is_told_which_there_are(call: str) -> None:
    done = nox("--no-venv", "-s", *call.split())
    assert done.returncode != 0
    parts = HOUSE["PARTS"][call.partition(" ")[0].partition("(")[0]]
    assert all(f"\n  {part}: {does.__doc__[:20]}" in done.stderr for part, does in parts.items())


def test_a_missing_interpreter_is_an_error() -> None:
    done = nox("--force-python", "3.99", "-s", "lint")
    assert done.returncode != 0
    assert "Python interpreter 3.99 not found" in done.stderr
    for path in WORKFLOWS:
        assert "missing-interpreters" not in path.read_text()


def test_each_package_has_a_tag_that_publishes_it() -> None:
    patterns = load("publish.yml")["on"]["push"]["tags"]
    assert sorted(patterns) == sorted(tag_of(package, "*") for package in PACKAGES)
    assert {parse_tag(pattern.replace("*", "1.2.0"))[0] for pattern in patterns} == set(PACKAGES)


def test_only_the_trusted_publisher_may_prove_who_it_is() -> None:
    for path in WORKFLOWS:
        workflow = load(path.name)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            publishes = (path.name, name) == ("publish.yml", "publish")
            assert job.get("permissions") == ({"id-token": "write"} if publishes else None)
    publish = load("publish.yml")["jobs"]["publish"]
    assert set(publish["needs"]) == {"tests", *PACKAGES, "thorough", "build"}
    assert publish["environment"] == "pypi"
    assert not any("password" in step.get("with", {}) for step in publish["steps"])


def test_what_ci_leaves_out_is_run_before_a_release() -> None:
    long = {f"long -- {part}" for part in ("failures", "thorough", "architectures")}
    others = {"docs -- snippets", "tensorflow", "conformance", "mutants -- written"}
    assert work("publish.yml") >= long | others


def test_gpus_are_used_by_hand_only() -> None:
    for path in WORKFLOWS:
        workflow = load(path.name)
        hosts = [str(job.get("runs-on", "")) for job in workflow["jobs"].values()]
        if any("self-hosted" in host for host in hosts):
            assert list(workflow["on"]) == ["workflow_dispatch"]
            assert path.name == "gpu.yml"


def test_actions_are_pinned_by_hash_and_have_one_version() -> None:
    places = [*WORKFLOWS, *(ROOT / ".github/actions").glob("*/action.yml")]
    lines = [line for path in places for line in re.findall(r"uses: (.+)", path.read_text())]
    pins = {line for line in lines if not line.startswith("./")}
    found = [re.fullmatch(r"([\w/-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+", pin) for pin in pins]
    assert found
    assert all(found), pins
    assert len({match[1] for match in found if match}) == len(pins), "one version of each action"
    for name in set(lines) - pins:
        assert (ROOT / name).is_file() or (ROOT / name / "action.yml").is_file()


def packages_tried(changed: str) -> set[str]:
    """Returns the packages whose workflows a pull request runs that changes a file."""
    patterns = {name: load(f"{name}.yml")["on"]["pull_request"]["paths"] for name in PACKAGES}
    return {
        name
        for name, paths in patterns.items()
        # Of what these patterns use, * is the same in both but for folders, which ** crosses.
        if any(fnmatch.fnmatchcase(changed, path.replace("**", "*")) for path in paths)
    }


@pytest.mark.parametrize(
    ("changed", "tried"),
    [
        *((f"packages/{name}/src/a.py", {name}) for name in DEPENDENTS),
        ("packages/smp-common/src/a.py", set(PACKAGES)),
        ("noxfile.py", set(PACKAGES)),
        ("tools/install_torch.py", set(PACKAGES)),
        (".github/actions/setup/action.yml", set(PACKAGES)),
        ("conformance/cases/common/ranks.py", {"smp-torch", "smp-tf"}),
        ("examples/torch/train_lm.py", {"smp-torch", "smp-tf"}),
        ("ROADMAP.md", set()),
        ("docs/index.md", set()),
    ],
)
def test_a_change_runs_what_it_touches(changed: str, tried: set[str]) -> None:
    assert packages_tried(changed) == tried
    paths = load("tests.yml")["on"]["pull_request"]["paths"]
    assert paths == load("smp-common.yml")["on"]["pull_request"]["paths"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_workflow_of_a_package_runs_all_kinds_of_its_tests(package: str) -> None:
    run, own = work(f"{package}.yml"), f"package({package})"
    assert f"{own} -- minimums" in run
    both = {f"{own} -- unit", f"{own} -- multiproc"}
    assert own in run or f"{own} -- compatibility" in run or run >= both
    frameworks = {name: framework for framework, name in HOUSE["PACKAGE_OF"].items()}
    if framework := frameworks.get(package):
        assert {f"conformance({framework})", "docs -- examples"} <= run
    # On main, before a release, and when it is called by what releases, nothing is filtered.
    on = load(f"{package}.yml")["on"]
    assert on["push"] == {"branches": ["main"]}
    assert "workflow_call" in on
    called = load("publish.yml")["jobs"][package]["uses"]
    assert called == f"./.github/workflows/{package}.yml"


def test_a_new_push_ends_the_runs_of_the_last_one() -> None:
    for path in WORKFLOWS:
        workflow = load(path.name)
        if "pull_request" in workflow["on"]:
            # By its own name: github.workflow is that of the caller where a workflow is called.
            assert workflow["concurrency"] == {
                "group": f"{path.stem}-${{{{ github.ref }}}}",
                "cancel-in-progress": "${{ github.event_name == 'pull_request' }}",
            }


# What is claimed is what is tested: classifiers, tox.ini, noxfile.py and workflows agree.


def pythons(package: str) -> list[str]:
    """Returns the Pythons that a package's classifiers claim."""
    classifiers = HOUSE["metadata"](package)["project"]["classifiers"]
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c) for c in classifiers)
    return [match[1] for match in found if match]


@pytest.mark.parametrize("package", PACKAGES)
def test_lowest_python_is_the_one_required(package: str) -> None:
    project = HOUSE["metadata"](package)["project"]
    assert project["requires-python"] == f">={pythons(package)[0]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_workflows_run_each_package_on_what_it_claims(package: str) -> None:
    wanted = {"python": pythons(package)}
    ours = [each for each in nox_calls(f"{package}.yml") if "--force-python" in each]
    assert {each[each.index("--force-python") + 1] for each in ours} == set(wanted["python"])
    if package == "smp-torch":
        wanted["torch"] = list(HOUSE["TORCHES"])
        assert [each[-1] for each in ours] == wanted["torch"] * len(wanted["python"])
        assert load("gpu.yml")["jobs"][package]["strategy"]["matrix"] == wanted
    assert load(f"{package}.yml")["jobs"]["claimed"]["strategy"]["matrix"] == wanted


def test_lowest_pytorch_is_the_one_required() -> None:
    lowest = HOUSE["TORCHES"][0]
    needed = HOUSE["metadata"]("smp-torch")["project"]["dependencies"]
    assert f"torch>={lowest.removesuffix('.0')}" in needed


@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_pages_name_the_pytorch_that_is_installed(page: str) -> None:
    assert install_torch.VERSION in HOUSE["TORCHES"]
    claimed = f"PyTorch {install_torch.VERSION.removesuffix('.0')}"
    assert f"CI tests Python 3.11 with {claimed}" in (ROOT / page).read_text()


def tox(package: str, *words: str) -> str:
    command = [sys.executable, "-m", "tox", *words, "-c", str(ROOT / "packages" / package)]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_tox_has_an_environment_for_all_that_a_package_claims(package: str) -> None:
    torches = HOUSE["TORCHES"] if package == "smp-torch" else [""]
    versions = ["torch" + "".join(torch.split(".")[:2]) if torch else "" for torch in torches]
    kinds = [kind for kind in ("unit", "multiproc") if HOUSE["suites"](kind, (package,))]
    names = itertools.product(pythons(package), versions, kinds)
    wanted = {"-".join(filter(None, (f"py{p.replace('.', '')}", t, k))) for p, t, k in names}
    assert set(tox(package, "list", "--no-desc", "-q").split()) == wanted


@pytest.mark.parametrize("framework", DEPENDENTS)
def test_tox_installs_what_an_environment_is_named_for(framework: str) -> None:
    config = tox(framework, "config", "-k", "deps", "commands_pre", "-q")
    _, *parts = re.split(r"^\[testenv:(.*)\]$", config, flags=re.MULTILINE)
    environments = dict(zip(parts[::2], parts[1::2], strict=True))
    assert environments
    for name, text in environments.items():
        assert "../smp-common" in text
        versions = re.findall(r"install_torch\.py (\S+)", text)
        names = [f"torch{''.join(version.split('.')[:2])}" for version in versions]
        assert names == re.findall("torch[0-9]+", name)
        assert set(versions) <= set(HOUSE["TORCHES"])


# What a contributor is told to run is there, and each tool has one version.


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", ".pre-commit-config.yaml"])
def test_pages_name_sessions_that_exist(page: str, known: set[str]) -> None:
    calls = re.findall(r"nox [^`\n]*?-s [^`\n#]+", (ROOT / page).read_text())
    assert calls
    words = list(map(shlex.split, calls))
    assert not [each for call in words for each in sessions(call) if each not in known]
    assert not list(itertools.chain(*map(unknown_parts, words)))


@pytest.mark.parametrize("name", sorted({part for of in HOUSE["PARTS"].values() for part in of}))
def test_a_part_is_told(name: str) -> None:
    assert re.search(rf"(`|-- ){name}\b", (ROOT / "CONTRIBUTING.md").read_text())


def test_a_commit_is_checked_by_a_part_of_the_session_of_ci() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    assert [hook["entry"] for hook in hooks] == ["nox -r -s lint -- style"]
    assert not any("additional_dependencies" in hook for hook in hooks), "a second pin of a tool"


def test_the_environment_to_work_in_has_the_tools_of_the_checks() -> None:
    groups = HOUSE["GROUPS"]["dependency-groups"]
    included = {each["include-group"] for each in groups["dev"] if isinstance(each, dict)}
    assert included >= {"lint", "typecheck", "imports", "house"}
    assert {"include-group": "test"} in groups["house"]


@pytest.mark.parametrize("name", HOUSE["SETTINGS"])
def test_a_setting_is_told(name: str) -> None:
    assert f"`{name}`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_what_ci_runs_in_a_setting_is_there() -> None:
    places = [word for word in HOUSE["OTHER_MAKER_SMOKE"] if word.endswith(".py")]
    assert places
    assert all((ROOT / place).is_file() for place in places)
