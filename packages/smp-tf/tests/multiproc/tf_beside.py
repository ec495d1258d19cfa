"""Runs one body with the library and with TensorFlow alone, so that their numbers can be compared.

A body takes a ``Side`` and returns what is the same on all ranks, and what each has of its own, by
name. It is written once: ``side.base`` is the class of models, ``side.step`` the decorator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tf_training import by_hand, no_partition
from tf_worlds import MICROBATCHES, PLAIN

from smdistributed.modelparallel.common.testing import World, Worlds

TOLERANCE = 1e-5


class Side(NamedTuple):
    """What a body needs of the library, or what stands for it.

    Attributes:
        base: class of models.
        part: marks the half of a model that operations belong to.
        step: decorator of step functions.
        mean: over replicas.
        share: takes a batch; returns the part of this replica.
    """

    base: Any
    part: Callable[[int], Any]
    step: Callable[[Any], Any]
    mean: Callable[[Any], Any]
    share: Callable[[Any], Any]


class Found(NamedTuple):
    """What a body found.

    Attributes:
        same: arrays that all ranks have.
        own: by name, arrays that one rank of a pipeline has.
    """

    same: Any
    own: dict[str, Any]


def with_library() -> Side:
    """Returns the side of the library, in a process that started it."""
    import smdistributed.modelparallel.tensorflow as smp

    def share(batch: Any) -> Any:
        count, place = smp.dp_size(), smp.dp_rank()
        return tf.nest.map_structure(lambda each: tf.split(each, count)[place], batch)

    return Side(smp.DistributedModel, by_hand(), smp.step, smp.allreduce, share)


def alone() -> Side:
    """Returns the side of TensorFlow, which computes the microbatches one after the other."""
    return Side(tf.keras.Model, no_partition, _plain_step, lambda value: value, lambda batch: batch)


def _plain_step(function: Any) -> Any:
    from smdistributed.modelparallel.tensorflow.stepping.output import StepOutput

    compiled = tf.function(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        def part(number: int) -> Any:
            return tf.nest.map_structure(
                lambda each: tf.split(each, MICROBATCHES)[number] if tf.is_tensor(each) else each,
                (args, kwargs),
            )

        parts = [part(number) for number in range(MICROBATCHES)]
        results = [compiled(*some, **named) for some, named in parts]
        weights = [1 / MICROBATCHES] * MICROBATCHES
        return tf.nest.map_structure(
            lambda *each: None if each[0] is None else StepOutput(each, weights), *results
        )

    return run


def on_side(body: Callable[..., Found], is_alone: bool, *args: Any) -> Found:
    """Runs a body; to be called on every rank."""
    found = body(alone() if is_alone else with_library(), *args)
    return Found(
        tf.nest.map_structure(_array, found.same),
        {name: _array(value) for name, value in found.own.items()},
    )


def by_name(variables: Any, values: Any) -> dict[str, Any]:
    """Returns values by the names of variables, without those of the library and those of None."""
    pairs = zip(variables, values, strict=True)
    names = ((getattr(variable, "path", variable.name), value) for variable, value in pairs)
    return {name: value for name, value in names if value is not None and "smp_anchor" not in name}


def _array(value: Any) -> Any:
    return (
        value
        if value is None or isinstance(value, (str, list))
        else np.array(tf.convert_to_tensor(value))
    )


def assert_same(
    worlds: Worlds,
    body: Callable[..., Found],
    *args: Any,
    world: World,
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that a world finds what TensorFlow alone does."""
    (expected,) = worlds.run(PLAIN, on_side, body, True, *args)
    compare(worlds.run(world, on_side, body, False, *args), expected, tolerance)


def compare(ranks: Sequence[Found], expected: Found, tolerance: float) -> None:
    """Asserts that ranks found what TensorFlow alone did."""
    own: dict[str, Any] = {}
    for found in ranks:
        _assert_close(found.same, expected.same, tolerance)
        own |= found.own
        for name, value in found.own.items():
            other = expected.own.get(name, np.nan)
            np.testing.assert_allclose(value, other, tolerance, tolerance, err_msg=name)
    assert sorted(own) == sorted(expected.own)


def _assert_close(found: Any, expected: Any, tolerance: float) -> None:
    tf.nest.assert_same_structure(found, expected)
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    for place, (one, other) in enumerate(pairs):
        if one is None or other is None or isinstance(one, str):
            assert (one is None) == (other is None), place
            assert one is None or one == other
        else:
            np.testing.assert_allclose(one, other, tolerance, tolerance, err_msg=str(place))
