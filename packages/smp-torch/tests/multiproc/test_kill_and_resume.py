"""The short form of the stress program; run that itself with more kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "stress" / "kill_and_resume.py"


def test_no_kill_loses_a_checkpoint_or_a_bit() -> None:
    job = subprocess.run(
        [sys.executable, str(PROGRAM), "--kills", "5"], capture_output=True, text=True, timeout=280
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "'kills': 5" in job.stdout
