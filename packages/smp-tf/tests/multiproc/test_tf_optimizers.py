"""Optimizers, clipping, half precision and the ways to ask for gradients, as in one process."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest
from test_tf_equality import QUIET
from tf_optimizers import (
    CASES,
    EVERY,
    LEGACY_CASES,
    SCALE,
    Outcome,
    fit,
    has_legacy,
    train_distributed,
    train_plainly,
)

from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]
NAMES = list(EVERY if has_legacy() else CASES)


@functools.cache
def plain() -> dict[str, Outcome]:
    body = train_plainly
    (result,) = run_ranks(1, body, launcher="python", timeout=120, args=[NAMES], env=QUIET).results
    return result


@functools.cache
def distributed() -> tuple[dict[str, Outcome], ...]:
    return run_ranks(2, train_distributed, timeout=180, args=[NAMES], env=QUIET).results


@pytest.mark.parametrize("name", EVERY)
def test_two_partitions_train_as_tensorflow_does(name: str) -> None:
    if name in LEGACY_CASES and not has_legacy():
        pytest.skip("Keras 3 has no legacy optimizers")
    expected = plain()[name]
    layers: list[int] = []
    for rank in distributed():
        got = rank[name]
        np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-6)
        np.testing.assert_allclose(got.extra, expected.extra, rtol=1e-6)
        assert got.weights
        for number, arrays in got.weights.items():
            for array, other in zip(arrays, expected.weights[number], strict=True):
                np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)
        layers += got.weights
    assert sorted(layers) == sorted(expected.weights)


def test_an_overflow_in_one_partition_is_one_in_all() -> None:
    scales = plain()["overflow"].extra
    assert min(scales) < SCALE, "no gradient overflowed"
    assert any(later > earlier for earlier, later in pairwise(scales)), "no step was made"
    first, second = (rank["overflow"].finite for rank in distributed())
    assert first != second, "no gradient overflowed in one partition alone"


def test_fit_in_half_precision_gives_the_losses_of_keras() -> None:
    (expected,) = run_ranks(1, fit, launcher="python", timeout=90, args=[False], env=QUIET).results
    for got in run_ranks(2, fit, timeout=90, args=[True], env=QUIET).results:
        np.testing.assert_allclose(got, expected, rtol=2e-3)
