"""The digits example: trains, resumes, and what it writes is a model of TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]
SCRIPT = "tensorflow/train_digits.py"


def shares(printed: str) -> list[float]:
    """Returns the shares of images that were recognised, in the order of printing."""
    words = printed.replace("reloaded:", "right").split()
    return [float(words[at + 1]) for at, word in enumerate(words) if word == "right"]


@pytest.mark.slow
def test_it_trains_and_writes_a_model_for_tensorflow(tmp_path: Path) -> None:
    options = ("--folder", str(tmp_path), "--partition", "manual", "--epochs", "2")
    printed = run(SCRIPT, 2, *options)
    found = shares(printed)
    assert found[-1] > 0.8
    assert "rank 0 holds conv_0, conv_1, norm_0, norm_1" in printed
    assert "rank 1 holds dense, dense_1" in printed
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
    assert shares(run(SCRIPT, 1, "--evaluate", str(tmp_path / "model"))) == found[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["manual", "auto"])
def test_it_trains_resumes_and_writes_a_model_for_tensorflow(
    tmp_path: Path, partition: str
) -> None:
    options = ("--folder", str(tmp_path), "--partition", partition)
    first = run(SCRIPT, 2, *options, "--epochs", "1")
    second = run(SCRIPT, 2, *options, "--epochs", "3")
    assert "resumed after epoch 1" in second
    assert shares(first)[-1] < shares(second)[-1]
    assert shares(second)[-1] > 0.9
    reloaded = run(SCRIPT, 1, "--evaluate", str(tmp_path / "model"))
    assert shares(reloaded) == shares(second)[-1:]
    assert list((tmp_path / "tensorboard").iterdir())
