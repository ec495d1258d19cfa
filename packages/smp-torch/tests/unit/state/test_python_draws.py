"""Every draw from Python's and NumPy's generators is noticed, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from smdistributed.modelparallel.torch.state.python_random import (
    python_draws,
    python_random_kept,
)

#: As many bits as a Mersenne twister has: it stands at the same place afterwards.
_ALL_BITS = 624 * 32


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with python_random_kept():
        random.seed(0)
        np.random.seed(0)
        yield


def _second_of_python() -> object:
    return random.gauss(0, 1)


def _second_of_numpy() -> object:
    return np.random.randn()


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.getrandbits(_ALL_BITS),
        lambda: random.shuffle([1, 2, 3]),
        lambda: random.seed(1),
        np.random.rand,
        np.random.randn,
        lambda: np.random.bytes(_ALL_BITS // 8),
        lambda: np.random.permutation(3),
        lambda: np.random.seed(1),
    ],
)
def test_a_draw_is_noticed(draw: Callable[[], object]) -> None:
    drew = python_draws()
    draw()
    assert drew()


@pytest.mark.parametrize("second", [_second_of_python, _second_of_numpy])
def test_the_second_of_two_normal_numbers_is_noticed(second: Callable[[], object]) -> None:
    second()  # makes two, and keeps one
    drew = python_draws()
    second()
    assert drew()


def test_looking_is_no_draw() -> None:
    drew = python_draws()
    random.getstate()
    np.random.get_state()
    vars(random.getstate.__self__)  # type: ignore[attr-defined]
    random.Random(1).random()
    np.random.RandomState(1).rand()
    np.random.default_rng(1).random()
    with python_random_kept():
        random.random()
        np.random.rand()
    assert not drew()


def test_another_kind_of_generator_behind_numpy_is_looked_at_too() -> None:
    former = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        drew = python_draws()
        assert not drew()
        np.random.rand()
        assert drew()
    finally:
        np.random.set_bit_generator(former)
