"""Replicas of a pipeline train, save and go on as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tf_checkpoints
import tf_replicas
from tf_beside import assert_same
from tf_worlds import TWO, TWO_REPLICAS

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def test_embeddings_are_trained_as_in_one_process(worlds: Worlds) -> None:
    assert_same(worlds, tf_replicas.embeddings, world=TWO_REPLICAS)


def test_they_begin_with_the_weights_of_the_first(worlds: Worlds) -> None:
    worlds.run(TWO_REPLICAS, tf_replicas.begin_alike)


def test_they_save_once_and_go_on(worlds: Worlds, tmp_path: Path) -> None:
    # Without dropout, of which replicas draw different masks, and without slices of embeddings.
    directory, name = str(tmp_path), "zigzag"
    losses, _ = worlds.run(TWO, tf_checkpoints.train_and_save, name, directory)
    for found in worlds.run(
        TWO_REPLICAS, tf_checkpoints.restore_and_train, name, directory, "before"
    ):
        np.testing.assert_allclose(found, losses, rtol=1e-6)
