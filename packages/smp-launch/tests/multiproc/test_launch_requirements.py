"""``requirements.txt`` beside a script: installed for its job, and for nothing else."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest
from job_bench import folder_of, log_of, make

from smdistributed.modelparallel.launch.exceptions import UnexpectedStatusException
from smdistributed.modelparallel.launch.session import Session

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(120),
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip"),
]


def write_wheel(folder: Path) -> str:
    """Makes a distribution with one module; returns the name of its wheel."""
    about = "smp_tiny_test-1.0.dist-info"
    files = {
        "smp_tiny_test.py": "WORD = 'installed'\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: smp-tiny-test\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    path = folder / "smp_tiny_test-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path.name


def test_what_is_missing_is_installed_for_the_job_alone(session: Session) -> None:
    script = "import smp_tiny_test; print(smp_tiny_test.WORD, smp_tiny_test.__file__)"
    estimator = make(session, script)
    code = session.root.parent / "code"
    # What is here already needs no index.
    (code / "requirements.txt").write_text(f"./{write_wheel(code)}\npytest\n")
    estimator.fit(logs=False)
    job = folder_of(estimator)
    assert f"installed {job.packages}/smp_tiny_test.py" in log_of(estimator)
    assert "smp-launch: 1 distributions of requirements.txt are installed" in log_of(estimator)
    assert importlib.util.find_spec("smp_tiny_test") is None
    assert not (job.packages / "pytest").exists()


@pytest.mark.slow
def test_what_cannot_be_installed_fails_the_job(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    estimator = make(session, "print('never')")
    (session.root.parent / "code/requirements.txt").write_text("smp-no-such-thing==1\n")
    with pytest.raises(
        UnexpectedStatusException,
        match=r"requirements.txt cannot be installed: .*smp-no-such-thing.*leave the file out",
    ):
        estimator.fit(logs=False)
    assert "never" not in log_of(estimator)
