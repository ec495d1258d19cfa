"""A model over processes gives the numbers of TensorFlow, and is executed once among them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tf_models import PROBLEMS
from tf_training import Trained, train, train_plainly
from tf_worlds import (
    FOUR,
    MICROBATCHES,
    ONE,
    PLAIN,
    TWO,
    TWO_BY_HAND,
    TWO_SIMPLE,
    world,
)

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
#: To be asked for the numbers of a model that is trained in a way.
Numbers = Callable[[str, str], list[Trained]]


class Way(NamedTuple):
    """A way to run models.

    Attributes:
        world: where.
        names: of the models.
        degree: number of partitions.
        as_on_gpus: see ``train``.
    """

    world: World
    names: tuple[str, ...]
    degree: int
    as_on_gpus: bool = False


ALL = tuple(PROBLEMS)
_FEW = ("cnn", "dropout", "transformer", "zigzag")
#: Models without places for ``smp.partition``.
_WHOLE = ("sequential", "functional", "mobilenet")
_BY_HAND = tuple(name for name in ALL if name not in _WHOLE)
#: The largest world first: it is the first that has to end for others.
WAYS = {
    # Without the largest, which takes as long as the others together; see CROSSED.
    "pp4": Way(FOUR, tuple(name for name in ALL if name != "mobilenet"), 4),
    "pp2": Way(TWO, ALL, 2),
    "pp2-as-on-gpus": Way(TWO, _FEW, 2, as_on_gpus=True),
    "pp2-manual": Way(TWO_BY_HAND, _BY_HAND, 2),
    "pp2-simple": Way(TWO_SIMPLE, _FEW, 2),
    "pp2-horovod2": Way(
        world(
            4,
            pipeline_parallel_degree=2,
            horovod=True,
            microbatches=MICROBATCHES // 2,
        ),
        ("transformer", "lstm"),
        2,
    ),
}
#: What is tried where not everything is: each world has what takes most ways through it, and each
#: kind of model one of several partitions, but for the largest, which takes as long as the others
#: together, for one of the two that are wrapped, and for attention, which goes no way of its own.
QUICK = {
    "one": ("inputs_and_outputs",),
    "pp4": ("shared_layer",),
    "pp2": tuple(
        name
        for name in ALL
        if name not in ("mobilenet", "sequential", "cnn", "shared_layer", "transformer")
    ),
    "pp2-as-on-gpus": ("zigzag",),
    "pp2-manual": ("zigzag",),
    "pp2-simple": ("cnn",),
    "pp2-horovod2": ("transformer", "lstm"),
}
#: Replicas add gradients up in another order; this model makes much of rounding. Layers of Keras 3
#: draw from seeds that count their calls, in each replica from the same one on.
_ALONE = ("mobilenet", "dropout") if hasattr(tf.keras, "Variable") else ("mobilenet",)
#: TensorFlow alone draws other masks, and rounds biases of keys, whose gradients are 0, otherwise.
_BESIDE_ONE = ("dropout", "transformer", "mobilenet")
#: All ways to run all models; takes long.
CROSSED = {
    f"pp{degree}-{'horovod' if replicas > 1 else 'replicas'}{replicas}-{pipeline}-"
    f"{'auto' if is_auto else 'manual'}": Way(
        world(
            degree * replicas,
            pipeline_parallel_degree=degree,
            pipeline=pipeline,
            horovod=replicas > 1,
            microbatches=MICROBATCHES // replicas,
            **({} if is_auto else {"auto_partition": False, "default_partition": 0}),
        ),
        tuple(
            name for name in (ALL if is_auto else _BY_HAND) if replicas == 1 or name not in _ALONE
        ),
        degree,
    )
    for degree, replicas in ((2, 1), (4, 1), (2, 2))
    for pipeline in ("interleaved", "simple")
    for is_auto in (True, False)
}


@pytest.fixture(scope="module")
def numbers(worlds: Worlds) -> Numbers:
    num_gpus = len(tf.config.list_physical_devices("GPU"))

    @functools.cache
    def of(way: str, name: str) -> list[Trained]:
        if way == "alone":
            return list(worlds.run(PLAIN, train_plainly, name, timeout=120))
        if way == "one":
            return list(worlds.run(ONE, train, name, timeout=120))
        own = {**WAYS, **CROSSED}[way]
        if 0 < num_gpus < own.world.num_ranks:
            pytest.skip(f"{own.world.num_ranks} GPUs are needed; there are {num_gpus}")
        if "horovod" in way and importlib.util.find_spec("horovod") is None:
            pytest.skip("Horovod is not installed: nox -s tensorflow -- horovod builds it")
        return list(worlds.run(own.world, train, name, own.as_on_gpus, timeout=120))

    return of


def assert_same(ranks: list[Trained], expected: Trained, num_partitions: int) -> None:
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, expected.losses, rtol=1e-6, atol=1e-6)
    pipeline = ranks[:num_partitions]
    held: list[int] = sorted(position for rank in pipeline for position in rank.held)
    assert held == list(range(expected.num_variables)), "each variable lives on one rank"
    if num_partitions > 1:
        _assert_each_operation_is_executed_once(pipeline)
    has_replicas = len(ranks) > num_partitions
    for rank in ranks:
        _assert_close(rank.gradients, expected.gradients, 1e-5, 1e-3)
        # A replica's moving averages are those of its own examples.
        weights = {
            position: array
            for position, array in rank.weights.items()
            if position in expected.gradients or not has_replicas
        }
        # A bias of keys has gradient 0 but for rounding, of which Adam makes steps of 1e-5.
        _assert_close(weights, expected.weights, 1e-4, 1.0)
    found = {position for rank in pipeline for position in rank.gradients}
    assert found == set(expected.gradients)


def _assert_each_operation_is_executed_once(pipeline: list[Trained]) -> None:
    whole = pipeline[0].operations
    assert len(whole) > 10
    assert len(set(whole)) == len(whole)
    assert sorted(name for rank in pipeline for name in rank.own) == sorted(whole)
    assert sum(bool(rank.own) for rank in pipeline) > 1, "one rank executes everything"


def _assert_close(
    received: dict[int, Any], expected: dict[int, Any], tolerance: float, scale: float
) -> None:
    for position, array in received.items():
        other = expected[position]
        bound = tolerance * max(float(np.abs(other).max()), scale)
        np.testing.assert_allclose(array, other, rtol=0, atol=bound, err_msg=str(position))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK["one"] else pytest.mark.slow)
        for name in ALL
        if name != "dropout"
    ],
)
def test_one_partition_gives_the_numbers_of_tensorflow(numbers: Numbers, name: str) -> None:
    (expected,) = numbers("alone", name)
    assert_same(numbers("one", name), expected, 1)


def check(numbers: Numbers, way: str, name: str) -> None:
    if name == "mobilenet" and tf.config.list_physical_devices("GPU"):
        pytest.xfail("kernels of cuDNN round otherwise in each process, and the model is chaotic")
    (expected,) = numbers("one" if name in _BESIDE_ONE else "alone", name)
    assert_same(numbers(way, name), expected, {**WAYS, **CROSSED}[way].degree)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=() if name in QUICK[way] else pytest.mark.slow)
        for way in WAYS
        for name in WAYS[way].names
    ],
)
def test_partitions_give_the_numbers_of_tensorflow(numbers: Numbers, way: str, name: str) -> None:
    check(numbers, way, name)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name"), [(w, name) for w in CROSSED for name in CROSSED[w].names])
def test_every_way_gives_the_numbers_of_tensorflow(numbers: Numbers, way: str, name: str) -> None:
    check(numbers, way, name)
