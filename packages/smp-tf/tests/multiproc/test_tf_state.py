"""Variables begin, are trained in replicas, and are saved as in one process, or refuse to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tf_state
from tf_beside import assert_same, on_side, with_library
from tf_worlds import PLAIN, TWO_BY_HAND, TWO_REPLICAS

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


def test_initial_values_are_drawn_once(worlds: Worlds) -> None:
    assert_same(worlds, tf_state.initial, world=TWO_BY_HAND)


def test_replicas_train_embeddings_as_one_process(worlds: Worlds) -> None:
    assert_same(worlds, tf_state.embeddings, world=TWO_REPLICAS)


def _partial_checkpoints(folder: str) -> None:
    tf_state.partial_checkpoints(with_library(), folder)


def test_no_part_of_a_model_is_taken_for_the_whole(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(TWO_BY_HAND, _partial_checkpoints, str(tmp_path))


def test_checkpoints_of_tensorflow_are_read(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "plain")
    (expected,) = worlds.run(PLAIN, on_side, tf_state.write_plainly, True, path)
    for found in worlds.run(TWO_BY_HAND, on_side, tf_state.read_plainly, False, path):
        np.testing.assert_allclose(found.same, expected.same, rtol=1e-5)


def _other_optimizers(folder: str) -> None:
    tf_state.other_optimizers(with_library(), folder)


def test_no_other_optimizer_takes_a_checkpoint(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(TWO_BY_HAND, _other_optimizers, str(tmp_path))
