"""The language model example: the same losses with any number of processes, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import SMALL_LM, WITHOUT_TENSORFLOW, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]


@pytest.fixture(autouse=True)
def _without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(WITHOUT_TENSORFLOW)


def train(folder: Path, num_processes: int, *options: str) -> str:
    """Runs the example and returns what it printed."""
    return run("torch/train_lm.py", num_processes, *SMALL_LM, "--folder", str(folder), *options)


def losses(folder: Path) -> dict[int, float]:
    """Returns the training losses, by step, that were written for TensorBoard."""
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in board.Scalars("loss/train")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1, "--steps", "6")
    return losses(folder)


def test_two_partitions_train(tmp_path: Path) -> None:
    printed = train(tmp_path, 2, "--steps", "6")
    found = losses(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] < found[1]
    assert "Partition assignments:" in printed
    assert "bits per byte; zlib needs" in printed
    arrows = [
        event["pid"]
        for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
        if event["ph"] == "s"
    ]
    # At least an activation there and a gradient back of each microbatch.
    assert arrows.count(0) == arrows.count(1) >= 4
    for picture in ("partition.svg", "timeline.svg"):
        assert (tmp_path / picture).read_text().startswith("<svg")


@pytest.mark.slow
def test_two_partitions_give_the_losses_of_one_process(
    alone: dict[int, float], tmp_path: Path
) -> None:
    train(tmp_path, 2, "--steps", "6")
    assert losses(tmp_path) == pytest.approx(alone, abs=1e-6, rel=0)


@pytest.mark.slow
def test_without_tied_weights_nothing_is_rounded_differently(tmp_path: Path) -> None:
    train(tmp_path / "one", 1, "--steps", "12", "--untied")
    train(tmp_path / "two", 2, "--steps", "12", "--untied")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


@pytest.mark.slow
def test_interrupted_training_goes_on_with_the_same_losses(
    alone: dict[int, float], tmp_path: Path
) -> None:
    train(tmp_path, 2, "--steps", "3")
    printed = train(tmp_path, 2, "--steps", "6")
    assert "resumed at step 3" in printed
    straight = tmp_path / "straight"
    train(straight, 2, "--steps", "6")
    assert losses(tmp_path) == losses(straight)
    assert losses(tmp_path) == pytest.approx(alone, abs=1e-6, rel=0)


@pytest.mark.slow
def test_replicas_share_the_batch(alone: dict[int, float], tmp_path: Path) -> None:
    # Each replica has half of every mini-batch, so only runs without dropout are comparable.
    train(tmp_path / "one", 1, "--steps", "4", "--dropout", "0")
    train(tmp_path / "four", 4, "--steps", "4", "--dropout", "0")
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-5, rel=0)


@pytest.mark.slow
def test_hugging_face_architecture(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = ("--steps", "4", "--hugging-face", "llama", "--dropout", "0")
    train(tmp_path / "one", 1, *options)
    train(tmp_path / "two", 2, *options)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-6, rel=0)
