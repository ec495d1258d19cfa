"""The runner works in environments that lack what it can do without, and says what it needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import registry, runner
from conformance.outcome import Status
from conformance.worlds import FRAMEWORKS

ROOT = Path(__file__).parents[2]


def conformance(folder: Path, lacks: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the suite where a module is not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules[{lacks!r}] = None")
    # From here on, relative places too: the suite is started from the top of the repository.
    paths = (str(folder), *sys.path)
    return subprocess.run(
        [sys.executable, "-m", "conformance", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cases_of_jobs_are_shown_without_smp_launch(tmp_path: Path, framework: str) -> None:
    (module,) = registry.JOBS
    done = conformance(tmp_path, module, "--framework", framework, "--list")
    assert done.returncode == 0, done.stderr
    assert "jobs_of_every_version_are_accepted" in done.stdout


def test_pytest_is_asked_for_at_the_start(tmp_path: Path) -> None:
    done = conformance(tmp_path, "pytest", "--framework", "torch", "--only", "smp.step")
    assert done.returncode == 2
    assert "pip install pytest" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_not_installed_is_neither_run_nor_passed(
    monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    monkeypatch.setattr(runner, "missing", lambda framework: "")
    monkeypatch.setattr(runner, "outcomes_in", lambda *_: pytest.fail("a case was run"))
    found = importlib.util.find_spec
    hidden = (*registry.JOBS, "kserve", "horovod")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else found(name)
    )
    every = registry.load(framework)
    cases = {name: each for name, each in every.items() if each.needs}
    of_jobs = {n for n, each in every.items() if ".launch_" in each.body.__module__}
    assert of_jobs
    assert of_jobs <= cases.keys()
    for name, outcome in runner.run(framework, cases).items():
        assert outcome.status is Status.NOT_INSTALLED
        assert cases[name].needs[0] in outcome.reason
