"""Checkpoints, and exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_checkpoints
from tf_worlds import FOUR, ONE, PLAIN, TWO, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    directory = str(tmp_path_factory.mktemp("checkpoints"))
    losses, same = worlds.run(TWO, tf_checkpoints.train_and_save, "dropout", directory)
    assert losses == same
    return directory, losses


@pytest.mark.parametrize(
    "when",
    # Conformance tries the others, too.
    [
        "in a hook",
        *(pytest.param(when, marks=pytest.mark.slow) for when in ("before", "after a step")),
    ],
)
def test_a_restored_model_goes_on_to_the_last_bit(worlds: Worlds, saved: Any, when: str) -> None:
    directory, losses = saved
    for found in worlds.run(TWO, tf_checkpoints.restore_and_train, "dropout", directory, when):
        assert found == losses


def test_averages_that_a_script_keeps_are_saved(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(TWO, tf_checkpoints.keep_and_restore, str(tmp_path))


@pytest.mark.parametrize("name", ["cnn", pytest.param("sequential", marks=pytest.mark.slow)])
def test_tensorflow_alone_loads_what_save_model_wrote(
    worlds: Worlds, tmp_path: Path, name: str
) -> None:
    folder = str(tmp_path / "model")
    expected, same = worlds.run(TWO, tf_checkpoints.export, name, folder)
    np.testing.assert_array_equal(expected, same)
    (found,) = worlds.run(PLAIN, tf_checkpoints.load, name, folder)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_save_model_wrote_takes_inputs_by_name(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(TWO_BY_HAND, tf_checkpoints.export_named, str(tmp_path / "model"))


@pytest.mark.parametrize(
    "world",
    [pytest.param(ONE, id="one"), pytest.param(FOUR, id="four", marks=pytest.mark.slow)],
)
def test_a_checkpoint_is_restored_with_another_number_of_partitions(
    worlds: Worlds, saved: Any, world: World
) -> None:
    directory, losses = saved
    for found in worlds.run(
        world, tf_checkpoints.restore_and_train, "dropout", directory, "before"
    ):
        np.testing.assert_allclose(found, losses, rtol=1e-6)
