"""A job that loses a rank, and is started again, has the losses of one that was left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import restarted
from world import run_fresh

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

SMPRUN = "smdistributed.modelparallel.common.launcher -n 2 --fork --restarts"
TORCHRUN = "torch.distributed.run --nproc-per-node 2 --max-restarts"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    return run_fresh(2, restarted.train, str(tmp_path_factory.mktemp("undisturbed")), 0)[0]


def lost_and_resumed(
    launcher: str, folder: Path, undisturbed: dict[int, list[str]], *last: int
) -> tuple[list[int], str]:
    """Returns the steps that were taken, all with the right losses, and the errors."""
    words = [*launcher.split(), str(len(last)), restarted.__file__, str(folder), *map(str, last)]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("step ")[2].split() for line in done.stdout.splitlines()]
    assert all(losses == undisturbed[int(step)] for step, *losses in lines)
    return [int(step) for step, *_ in lines], done.stderr


def test_smprun_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, undisturbed: dict[int, list[str]]
) -> None:
    steps, errors = lost_and_resumed(SMPRUN, tmp_path, undisturbed, 4, 8)
    assert steps == [1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9]  # it is saved after each second step
    own = [line for line in errors.splitlines() if line.startswith("smprun: restart")]
    assert own == [f"smprun: restart {number} of 2 in 2 s" for number in (1, 2)]
    assert errors.count("smprun: rank 1 (") == errors.count("SIGKILL") == 2


@pytest.mark.slow  # of what goes on it shows the same; here two attempts import PyTorch twice each
def test_torchrun_does_too(tmp_path: Path, undisturbed: dict[int, list[str]]) -> None:
    # Its agent has one store for all attempts.
    steps, _ = lost_and_resumed(TORCHRUN, tmp_path, undisturbed, 4)
    assert steps == [1, 2, 3, *range(3, restarted.STEPS + 1)]
