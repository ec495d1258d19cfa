"""Optimizers, clipping, half precision and the ways to ask for gradients, as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tf_optimizers import (
    EVERY,
    HALF,
    LEGACY_CASES,
    SCALE,
    Outcome,
    fit,
    has_legacy,
    train_distributed,
    train_plainly,
)
from tf_worlds import PLAIN, TWO

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


Trainings = Callable[[str], tuple[Outcome, tuple[Outcome, ...]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns where each case has its checkpoint."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(worlds: Worlds, folder: Path) -> Trainings:
    """Returns what a case gives in one process, and in each of two."""

    @functools.cache
    def of(name: str) -> tuple[Outcome, tuple[Outcome, ...]]:
        (plain,) = worlds.run(PLAIN, train_plainly, name)
        return plain, worlds.run(TWO, train_distributed, name, str(folder / name))

    return of


@pytest.mark.parametrize("name", EVERY)
def test_two_partitions_train_as_tensorflow_does(trained: Trainings, name: str) -> None:
    if name in LEGACY_CASES and not has_legacy():
        pytest.skip("Keras 3 has no legacy optimizers")
    expected, ranks = trained(name)
    layers: list[int] = []
    for found in ranks:
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
        np.testing.assert_allclose(found.extra, expected.extra, rtol=1e-6)
        assert found.weights
        for number, arrays in found.weights.items():
            for array, other in zip(arrays, expected.weights[number], strict=True):
                np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)
        layers += found.weights
    assert set(layers) == set(expected.weights)


def test_an_overflow_in_one_partition_is_one_in_all(trained: Trainings) -> None:
    expected, ranks = trained("overflow")
    scales = expected.extra
    assert min(scales) < SCALE, "no gradient overflowed"
    assert any(later > earlier for earlier, later in pairwise(scales)), "no step was made"
    first, second = (rank.finite for rank in ranks)
    assert first != second, "no gradient overflowed in one partition alone"


def test_training_is_resumed_with_the_scale_of_its_losses(
    worlds: Worlds, trained: Trainings, folder: Path
) -> None:
    _, whole = trained("overflow")
    resumed = worlds.run(TWO, train_distributed, "overflow", str(folder / "overflow"), True)
    for rank, other in zip(resumed, whole, strict=True):
        assert other.extra[HALF - 1] != SCALE, "the scale is still the first one"
        assert (rank.extra, rank.finite) == (other.extra[HALF:], other.finite[HALF:])
        np.testing.assert_allclose(rank.losses, other.losses[HALF:], rtol=1e-6)


def test_fit_in_half_precision_gives_the_losses_of_keras(worlds: Worlds) -> None:
    (expected,) = worlds.run(PLAIN, fit, False)
    for found in worlds.run(TWO, fit, True):
        np.testing.assert_allclose(found, expected, rtol=2e-3)
