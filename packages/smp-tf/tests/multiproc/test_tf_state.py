"""Variables begin, and are saved, as in one process, or refuse to be."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tf_state
from tf_beside import assert_same, on_side, with_library
from tf_worlds import PLAIN, TWO, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


def test_initial_values_are_drawn_once(worlds: Worlds) -> None:
    assert_same(worlds, tf_state.initial, world=TWO_BY_HAND)


def test_checkpoints_of_tensorflow_are_read(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "plain")
    (expected,) = worlds.run(PLAIN, on_side, tf_state.write_plainly, True, path)
    for found in worlds.run(TWO_BY_HAND, on_side, tf_state.read_plainly, False, path):
        np.testing.assert_allclose(found.same, expected.same, rtol=1e-5)


def test_weights_in_files_are_those_of_keras(worlds: Worlds, tmp_path: Path) -> None:
    for body in (tf_state.write_weights, tf_state.read_weights):
        assert_same(worlds, body, str(tmp_path), world=TWO)
    assert len(list(tmp_path.glob("*.weights.h5"))) == 2
    (models,) = worlds.run(PLAIN, tf_state.read_models, str(tmp_path))
    for split, plain in itertools.pairwise(models):
        assert split[:2] == plain[:2]
        np.testing.assert_allclose(split[2:], plain[2:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("freq", [pytest.param("epoch", marks=pytest.mark.slow), 3])
def test_a_training_goes_on_from_a_backup(worlds: Worlds, tmp_path: Path, freq: str | int) -> None:
    assert_same(worlds, tf_state.backed_up, str(tmp_path), freq, world=TWO_BY_HAND)


def _checkpoints(name: str, folder: str) -> None:
    getattr(tf_state, name)(with_library(), folder)


def test_a_checkpoint_of_layers_without_names_goes_into_others(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(TWO, _checkpoints, "unnamed_models", str(tmp_path))


@pytest.mark.parametrize(
    "name", ["partial_checkpoints", "other_optimizers", "other_variables", "other_models"]
)
def test_checkpoints_are_whole_or_refused(worlds: Worlds, tmp_path: Path, name: str) -> None:
    worlds.run(TWO_BY_HAND, _checkpoints, name, str(tmp_path))
