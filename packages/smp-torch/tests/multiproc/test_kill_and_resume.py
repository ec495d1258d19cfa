"""The short forms of the stress programs; run those themselves with more kills.

Slow: every operation of a save is killed in smp-common's tests, and a killed job goes on to the
last bit in ``test_checkpoint``, both with saves behind training too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.testing.two_hosts import NoHostsError, two_hosts

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(300)]

STRESS = Path(__file__).parents[1] / "stress"


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (20, []),
        (20, ["--asynchronous"]),
    ],
)
def test_no_kill_loses_a_checkpoint_or_a_bit(kills: int, options: list[str]) -> None:
    command = [sys.executable, str(STRESS / "kill_and_resume.py"), "--kills", str(kills), *options]
    job = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"'kills': {kills}" in job.stdout


@pytest.mark.parametrize("kind", ["pipeline", "shards", "torchrun"])
def test_a_job_goes_on_with_the_hosts_that_are_left(kind: str, tmp_path: Path) -> None:
    try:
        with two_hosts(tmp_path):
            pass
    except NoHostsError as error:
        pytest.skip(str(error))
    command = [sys.executable, str(STRESS / "lose_hosts.py"), "--kills", "4", "--only", kind]
    job = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "'losses compared'" in job.stdout
