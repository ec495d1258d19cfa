"""The language model in TensorFlow: the losses of one process, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import SMALL_LM, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]


def train(folder: Path, num_processes: int, *options: str) -> str:
    """Runs the example and returns what it printed."""
    script = "tensorflow/train_lm.py"
    return run(script, num_processes, *SMALL_LM, "--folder", str(folder), *options)


def losses(folder: Path) -> dict[int, float]:
    """Returns the training losses, by step, that were written for TensorBoard."""
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    events = board.Tensors("loss/train")
    return {event.step: float(tensor_util.make_ndarray(event.tensor_proto)) for event in events}


@pytest.mark.slow
def test_two_partitions_train(tmp_path: Path) -> None:
    train(tmp_path, 2, "--steps", "6")
    found = losses(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] < found[1]


@pytest.mark.slow
def test_two_partitions_give_the_losses_of_one_process_also_after_a_resume(tmp_path: Path) -> None:
    train(tmp_path / "alone", 1, "--steps", "6")
    alone = losses(tmp_path / "alone")
    train(tmp_path / "two", 2, "--steps", "3")
    assert "resumed at step 3" in train(tmp_path / "two", 2, "--steps", "6")
    assert losses(tmp_path / "two") == pytest.approx(alone, abs=2e-6, rel=0)
