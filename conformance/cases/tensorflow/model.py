"""TensorFlow: ``DistributedModel``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import WIDTH
from conformance.registry import tensorflow_case

_SOME = ("alone", "pipeline", "both")


def run(adapter: Any, model: Any, size: int = 8) -> Any:
    """Returns the StepOutput of a step that calls the model on one batch."""

    @adapter.smp.step
    def body(x: Any) -> Any:
        return model(x)

    return body(adapter.tensor(adapter.batch(size)))


@tensorflow_case("smp.DistributedModel", worlds=("alone",))
def a_distributed_model_is_one_of_keras(adapter: Any) -> None:
    assert issubclass(adapter.smp.DistributedModel, adapter.tf.keras.Model)
    assert isinstance(adapter.model(), adapter.smp.DistributedModel)


@tensorflow_case("smp.DistributedModel", worlds=("alone", "pipeline"))
def a_model_is_not_called_outside_a_step(adapter: Any) -> None:
    with pytest.raises(RuntimeError, match="step"):
        adapter.model()(adapter.tensor(adapter.batch(8)))


@tensorflow_case("smp.DistributedModel", worlds=("alone", "pipeline"))
def a_model_that_was_stepped_is_not_called_outside_either(adapter: Any) -> None:
    model = adapter.model()
    run(adapter, model)
    with pytest.raises(RuntimeError, match="step"):
        model(adapter.tensor(adapter.batch(8)))


@tensorflow_case("smp.DistributedModel", "smp.DistributedModel.call", worlds=("alone", "pipeline"))
def a_model_without_call_is_named(adapter: Any) -> None:
    class Unfinished(adapter.smp.DistributedModel):  # type: ignore[misc]
        pass

    with pytest.raises(NotImplementedError, match="Unfinished"):
        run(adapter, Unfinished())


@tensorflow_case("smp.DistributedModel", "config.pipeline_parallel_degree", worlds=_SOME)
def every_layer_lives_on_one_process_of_the_replica(adapter: Any) -> None:
    model = adapter.chain()
    run(adapter, model)
    held = adapter.held(model)
    assert sorted(place for each in held for place in each) == [0, 1, 2, 3]
    assert all(held)


@tensorflow_case("smp.DistributedModel", "tensorflow.partitioner.2", worlds=_SOME)
def operations_of_the_model_run_once_and_those_outside_everywhere(adapter: Any) -> None:
    """Counters tell how often an operation ran: once a microbatch."""
    smp, tf = adapter.smp, adapter.tf
    outside = tf.Variable(0.0, trainable=False)
    calls: list[int] = []

    class Counting(smp.DistributedModel):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name="counting")
            self.dense = tf.keras.layers.Dense(WIDTH)

        def call(self, inputs: Any, training: Any = None) -> Any:
            x = self.dense(inputs)
            return tf.ensure_shape(tf.numpy_function(note, [x], tf.float32), x.shape)

    def note(x: Any) -> Any:
        calls.append(len(x))
        return x

    model = Counting()

    @smp.step
    def body(x: Any) -> Any:
        outside.assign_add(1.0)
        return tf.reduce_sum(model(x))

    body(adapter.tensor(adapter.batch(8)))
    microbatches = adapter.config.microbatches
    assert sum(len(each) for each in smp.allgather(calls, smp.PP_GROUP)) == microbatches
    assert float(outside) == microbatches


@tensorflow_case("tensorflow.partitioner.2", "smp.DistributedModel", worlds=("alone", "pipeline"))
def variables_are_not_copied_for_microbatches(adapter: Any) -> None:
    """All microbatches add to one variable of the model."""
    smp, tf = adapter.smp, adapter.tf

    class Adding(smp.DistributedModel):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name="adding")
            self.dense = tf.keras.layers.Dense(WIDTH)
            self.total = self.add_weight(
                name="total", shape=(), initializer="zeros", trainable=False
            )

        def call(self, inputs: Any, training: Any = None) -> Any:
            self.total.assign_add(tf.reduce_sum(inputs))
            return self.dense(inputs)

    model = Adding()
    run(adapter, model)
    total = float(tf.convert_to_tensor(model.total))  # on every process, whichever has it
    np.testing.assert_allclose(total, adapter.batch(8).sum(), rtol=1e-4)


@tensorflow_case(
    "smp.DistributedModel.call(training)",
    "smp.DistributedModel.call",
    "common.model_output_everywhere",
    worlds=_SOME,
)
def call_is_given_its_arguments(adapter: Any) -> None:
    smp, tf = adapter.smp, adapter.tf

    class Switching(smp.DistributedModel):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name="switching")
            self.double = tf.keras.layers.Dense(WIDTH, kernel_initializer="identity")

        def call(self, inputs: Any, training: Any = None) -> Any:
            out = self.double(inputs["a"])
            return {"sum": out + inputs["b"], "sign": (-out if training else out,)}

    model = Switching()

    @smp.step
    def body(data: Any, training: bool) -> Any:
        return model(data, training=training)

    a, b = adapter.batch(8), adapter.batch(8, seed=1)
    data = {"a": adapter.tensor(a), "b": adapter.tensor(b)}
    for training in (True, False):
        outputs = body(data, training)
        np.testing.assert_allclose(adapter.array(outputs["sum"].concat()), a + b, atol=1e-6)
        sign = adapter.array(outputs["sign"][0].concat())
        np.testing.assert_allclose(sign, -a if training else a, atol=1e-6)


@tensorflow_case("smp.DistributedModel", worlds=("alone", "pipeline"))
def a_second_model_is_refused_or_right(adapter: Any) -> None:
    """The original refuses two models in one job; this library may do both, but nothing else."""
    smp = adapter.smp
    first = adapter.model()
    try:
        second = adapter.chain()
    except Exception as error:
        if "one" not in str(error):
            raise
        return

    @smp.step
    def body(x: Any) -> Any:
        return second(first(x))

    x = adapter.batch(8)
    got = body(adapter.tensor(x))
    wanted = adapter.array(adapter.plain()(adapter.tensor(adapter.reference(x))))
    np.testing.assert_allclose(adapter.array(got.concat()), wanted, atol=1e-5)


@tensorflow_case("smp.DistributedModel", worlds=("pipeline",))
def evaluation_goes_through_partitions_without_inputs(adapter: Any) -> None:
    """A part that reads nothing of the batch must not hold up a forward pass."""
    smp, tf = adapter.smp, adapter.tf

    class Lonely(smp.DistributedModel):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name="lonely")
            self.first = tf.keras.layers.Dense(WIDTH, kernel_initializer="identity")
            self.table = tf.keras.layers.Embedding(3, WIDTH, embeddings_initializer="ones")

        def call(self, inputs: Any, training: Any = None) -> Any:
            return self.first(inputs) + self.table(tf.constant(1))

    output = run(adapter, Lonely())
    np.testing.assert_allclose(adapter.array(output.concat()), adapter.batch(8) + 1, atol=1e-6)
