"""The digits example: trains, resumes, and what it writes is a model of TensorFlow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]

SCRIPT = Path(__file__).parents[1] / "tensorflow" / "train_digits.py"


def run(num_processes: int, *options: str) -> str:
    """Runs the example and returns what it printed."""
    command = [sys.executable, str(SCRIPT)]
    if num_processes > 1:
        launcher = "smdistributed.modelparallel.common.launcher"
        command = [sys.executable, "-m", launcher, "-n", str(num_processes), str(SCRIPT)]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shares(printed: str) -> list[float]:
    """Returns the shares of images that were recognised, in the order of printing."""
    words = printed.replace("reloaded:", "right").split()
    return [float(words[at + 1]) for at, word in enumerate(words) if word == "right"]


@pytest.mark.parametrize("partition", ["manual", "auto"])
def test_it_trains_resumes_and_writes_a_model_for_tensorflow(
    tmp_path: Path, partition: str
) -> None:
    options = ("--folder", str(tmp_path), "--partition", partition)
    first = run(2, *options, "--epochs", "1")
    second = run(2, *options, "--epochs", "3")
    assert "resumed after epoch 1" in second
    assert shares(first)[-1] < shares(second)[-1]
    assert shares(second)[-1] > 0.9
    reloaded = run(1, "--evaluate", str(tmp_path / "model"))
    assert shares(reloaded) == shares(second)[-1:]
    assert list((tmp_path / "tensorboard").iterdir())
