"""Checkpoints, exported models, and Keras's own training loop."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_lifecycle
from test_tf_equality import QUIET

from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
TWO = {"pipeline_parallel_degree": 2}


def run(num_ranks: int, body: Any, *args: object) -> tuple[Any, ...]:
    launcher = "python" if num_ranks == 1 else "smprun"
    return run_ranks(num_ranks, body, launcher=launcher, timeout=200, args=args, env=QUIET).results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    directory = str(tmp_path_factory.mktemp("checkpoints"))
    losses, same = run(2, tf_lifecycle.train_and_save, TWO, "dropout", directory)
    assert losses == same
    return directory, losses


@pytest.mark.parametrize("when", ["before", "in a hook", "after a step"])
def test_a_restored_job_goes_on_to_the_last_bit(saved: Any, when: str) -> None:
    directory, losses = saved
    for got in run(2, tf_lifecycle.restore_and_train, TWO, "dropout", directory, when):
        assert got == losses


@pytest.mark.parametrize("degree", [1, 4])
def test_a_checkpoint_is_restored_with_another_number_of_partitions(
    saved: Any, degree: int
) -> None:
    directory, losses = saved
    config = {"pipeline_parallel_degree": degree}
    for got in run(degree, tf_lifecycle.restore_and_train, config, "dropout", directory, "before"):
        np.testing.assert_allclose(got, losses, rtol=1e-6)


def test_replicas_save_once_and_go_on(tmp_path: Path) -> None:
    # Without dropout, of which replicas draw different masks, and without slices of embeddings.
    directory, name = str(tmp_path), "zigzag"
    losses, _ = run(2, tf_lifecycle.train_and_save, TWO, name, directory)
    for got in run(4, tf_lifecycle.restore_and_train, TWO, name, directory, "before"):
        np.testing.assert_allclose(got, losses, rtol=1e-6)


@pytest.mark.parametrize("name", ["cnn", "sequential"])
def test_tensorflow_alone_loads_what_save_model_wrote(tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "model")
    expected, same = run(2, tf_lifecycle.export, TWO, name, folder)
    np.testing.assert_array_equal(expected, same)
    (got,) = run(1, tf_lifecycle.load, name, folder)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def _fitted_plainly() -> dict[str, Any]:
    (result,) = run(1, tf_lifecycle.fit, None)
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("degree", [1, 2])
def test_fit_evaluate_and_predict_give_the_numbers_of_keras(degree: int) -> None:
    expected = _fitted_plainly()
    for got in run(degree, tf_lifecycle.fit, {"pipeline_parallel_degree": degree}):
        assert set(got["history"]) == set(expected["history"])
        for key, values in expected["history"].items():
            np.testing.assert_allclose(got["history"][key], values, rtol=1e-4, err_msg=key)
        for key, value in expected["scores"].items():
            np.testing.assert_allclose(got["scores"][key], value, rtol=1e-4, err_msg=key)
        np.testing.assert_allclose(got["predicted"], expected["predicted"], rtol=1e-3, atol=1e-4)
