"""Mistakes in a script must be clear errors, on every rank, not hangs or wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.errors import (
    ConfigError,
    PartitionError,
    SMPError,
)
from smdistributed.modelparallel.common.testing import Worlds, cases_of

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

WIDTH = 4


def layers(between: Callable[[Any], Any] = lambda x: x) -> Any:
    """Returns a model with one layer on each of two partitions."""
    import smdistributed.modelparallel.tensorflow as smp

    class Layers(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="layers")
            self.first = tf.keras.layers.Dense(WIDTH, name="first")
            self.second = tf.keras.layers.Dense(WIDTH, name="second")

        def call(self, x: Any) -> Any:
            with smp.partition(0):
                x = self.first(x)
            with smp.partition(1):
                return self.second(between(x))

    return Layers()


def stepping(model: Any) -> Any:
    """Returns a step function whose result is the sum of each example's outputs."""
    import smdistributed.modelparallel.tensorflow as smp

    return smp.step(lambda x: tf.reduce_sum(model(x), axis=1))


def expect(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        call()


def ones(size: int) -> Any:
    return tf.ones([size, WIDTH])


def case_wrong_batch_sizes() -> None:
    step = stepping(layers())
    expect(ConfigError, r"is smaller than microbatches \(4\)", lambda: step(ones(3)))
    expect(ConfigError, "the batch is empty", lambda: step(ones(0)))
    output = stepping(layers())(ones(5))
    assert [len(each) for each in output.outputs] == [2, 1, 1, 1]
    assert output.weights == [0.4, 0.2, 0.2, 0.2]


def case_unequal_batch_sizes() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()
    step = smp.step(lambda x, y: model(x) * y)
    expect(ConfigError, "x has 4 along axis 0, y has 6", lambda: step(ones(4), ones(6)))


def case_unknown_partition() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    def within(index: Any) -> None:
        with smp.partition(index):
            pass

    for index in (2, -1):
        expect(
            ValueError, f"from 0 to 1; smp.partition received {index}", lambda i=index: within(i)
        )
    expect(TypeError, "index of a partition, an int; received '1'", lambda: within("1"))

    def of_an_absent_one(x: Any) -> Any:
        with smp.partition(7):
            return x * 2.0

    expect(ValueError, "received 7", lambda: stepping(layers(of_an_absent_one))(ones(4)))


def case_model_outside_a_step() -> None:
    model = layers()
    expect(SMPError, r"decorated with @smp\.step", lambda: model(ones(4)))
    stepping(model)(ones(4))
    expect(SMPError, r"decorated with @smp\.step", lambda: model(ones(4)))


def case_step_without_the_model() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    step = smp.step(lambda x: tf.reduce_sum(x))
    expect(SMPError, "results must depend on the model", lambda: step(ones(4)))


def case_step_in_a_step() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    inner = stepping(layers())
    expect(SMPError, "inside another step", lambda: smp.step(lambda x: inner(x))(ones(4)))


def case_variable_of_another_rank() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()
    stepping(model)(ones(4))
    every = tf.keras.Model.variables.fget(model)
    mine = model.variables
    held = {id(v) for v in mine}
    others = [v for v in every if id(v) not in held]
    assert len(mine) == len(others) == 2
    other = 1 - smp.rank()
    where = rf"lives on rank {other} \(partition {other}\)"
    for variable in others:
        expect(PartitionError, where, lambda v=variable: v.numpy())
        expect(PartitionError, where, lambda v=variable: v.assign(tf.zeros(v.shape)))
        expect(PartitionError, where, lambda v=variable: tf.convert_to_tensor(v))
    for variable in mine:
        assert variable.numpy().shape == variable.shape


def case_models_that_differ() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    between = tf.tanh if smp.rank() else tf.sin
    step = stepping(layers(between))
    message = "the operations of layers differ between rank 0 and rank 1"
    expect(PartitionError, message, lambda: step(ones(4)))
    assert stepping(layers())(ones(4)).concat().shape == [4]


def case_gradients_twice() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()

    def body(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = model(x)
            losses = [tf.reduce_sum(y), tf.reduce_sum(y * y)]
        return [tape.gradient(loss, model.trainable_variables) for loss in losses]

    expect(SMPError, "were asked for twice", lambda: smp.step(body)(ones(4)))


def case_no_call() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    class Bare(smp.DistributedModel):  # type: ignore[misc]
        pass

    expect(NotImplementedError, r"Bare needs a method call\(", lambda: stepping(Bare())(ones(4)))


def case_hook_that_is_no_function() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    expect(TypeError, "function without arguments", lambda: smp.register_post_partition_hook(3))


def case_gradients_alone() -> None:
    """A step whose result needs no output of the model, which travels all the same."""
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()

    def body(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables)

    step = smp.step(body)
    for _ in range(2):
        gradients = step(ones(4))
        assert len(gradients) == 2


@pytest.mark.parametrize("case", cases_of(globals()))
def test_case(worlds: Worlds, case: str) -> None:
    worlds.run(TWO_BY_HAND, cases_of(globals())[case])
