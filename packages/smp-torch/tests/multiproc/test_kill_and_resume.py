"""The short form of the stress program; run that itself with more kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "stress" / "kill_and_resume.py"


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_no_kill_loses_a_checkpoint_or_a_bit(kills: int) -> None:
    command = [sys.executable, str(PROGRAM), "--kills", str(kills)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"'kills': {kills}" in job.stdout
