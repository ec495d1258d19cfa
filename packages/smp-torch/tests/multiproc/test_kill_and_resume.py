"""The short form of the stress program; run that itself with more kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "stress" / "kill_and_resume.py"


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (1, ["--asynchronous"]),
        # Every operation of a save is killed in smp-common's tests, which hold for both.
        pytest.param(1, [], marks=pytest.mark.slow),
        pytest.param(20, [], marks=pytest.mark.slow),
        pytest.param(20, ["--asynchronous"], marks=pytest.mark.slow),
    ],
)
def test_no_kill_loses_a_checkpoint_or_a_bit(kills: int, options: list[str]) -> None:
    command = [sys.executable, str(PROGRAM), "--kills", str(kills), *options]
    job = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"'kills': {kills}" in job.stdout
