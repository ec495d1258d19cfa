"""The short form of the stress program; run that itself with more kills.

Slow: every operation of a save is killed in smp-common's tests, and a killed job goes on to the
last bit in ``test_checkpoint``, both with saves behind training too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "stress" / "kill_and_resume.py"


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (20, []),
        (20, ["--asynchronous"]),
    ],
)
def test_no_kill_loses_a_checkpoint_or_a_bit(kills: int, options: list[str]) -> None:
    command = [sys.executable, str(PROGRAM), "--kills", str(kills), *options]
    job = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"'kills': {kills}" in job.stdout
