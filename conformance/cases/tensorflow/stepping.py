"""TensorFlow: step functions are functions of TensorFlow, and data comes from its data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import WIDTH
from conformance.cases.tensorflow.training import stepped
from conformance.registry import tensorflow_case

_ROW = "tensorflow.step_function.3"


@tensorflow_case("smp.step", worlds=("alone", "pipeline"))
def the_body_runs_in_graph_mode(adapter: Any) -> None:
    tf, model, modes = adapter.tf, adapter.model(), []

    @adapter.smp.step
    def body(x: Any) -> Any:
        modes.append(tf.executing_eagerly())
        return model(x)

    body(adapter.tensor(adapter.batch(8)))
    assert modes
    assert not any(modes)


@tensorflow_case("smp.step", _ROW, worlds=("alone", "pipeline"))
def a_step_is_traced_anew_for_new_shapes_and_python_values_only(adapter: Any) -> None:
    model, traces = adapter.model(), []

    @adapter.smp.step
    def body(x: Any, scale: float) -> Any:
        traces.append(x.shape)
        return model(x) * scale

    def is_traced(size: int, scale: float) -> bool:
        before, x = len(traces), adapter.batch(size, seed=size)
        got = adapter.array(body(adapter.tensor(x), scale).concat())
        np.testing.assert_allclose(got, adapter.reference(x) * scale, atol=1e-5)
        return len(traces) > before

    assert is_traced(8, 1.0)
    assert not is_traced(8, 1.0)
    assert is_traced(12, 1.0)
    assert is_traced(8, 3.0)
    assert not is_traced(8, 3.0)


@tensorflow_case("smp.step", _ROW, "compat.step_forms_and_results", worlds=("alone", "pipeline"))
def an_input_signature_holds(adapter: Any) -> None:
    tf, model, x = adapter.tf, adapter.model(), adapter.batch(8)

    @adapter.smp.step(input_signature=[tf.TensorSpec([8, WIDTH], tf.float32)])
    def body(x: Any) -> Any:
        return model(x)

    got = adapter.array(body(adapter.tensor(x)).concat())
    np.testing.assert_allclose(got, adapter.reference(x), atol=1e-6)
    with pytest.raises((TypeError, ValueError)):
        body(adapter.tensor(adapter.batch(12)))


@tensorflow_case("smp.step", _ROW, worlds=("alone", "pipeline"))
def a_signature_can_leave_the_batch_size_open(adapter: Any) -> None:
    tf, model, traces = adapter.tf, adapter.model(), []

    @adapter.smp.step(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32)])
    def body(x: Any) -> Any:
        traces.append(x.shape)
        return model(x)

    for size in (8, 12):
        x = adapter.batch(size)
        got = adapter.array(body(adapter.tensor(x)).concat())
        np.testing.assert_allclose(got, adapter.reference(x), atol=1e-6)
        if size == 8:
            traces.clear()
    assert not traces


@tensorflow_case("smp.step", _ROW, worlds=("alone", "pipeline"))
def a_step_takes_the_options_of_functions(adapter: Any) -> None:
    model, x = adapter.model(), adapter.batch(8)
    for options in ({"autograph": True}, {"reduce_retracing": True}, {"autograph": False}):

        @adapter.smp.step(**options)
        def body(x: Any) -> Any:
            return model(x)

        got = adapter.array(body(adapter.tensor(x)).concat())
        np.testing.assert_allclose(got, adapter.reference(x), atol=1e-6)
    with pytest.raises(TypeError):
        adapter.smp.step(no_such_option=1)(lambda x: model(x))(adapter.tensor(x))


@tensorflow_case(_ROW, worlds=("alone", "pipeline"))
def the_global_switch_of_xla_changes_no_number(adapter: Any) -> None:
    tf, x, y = adapter.tf, adapter.batch(8), adapter.batch(8, seed=1)

    def loss() -> float:
        _, loss, _ = stepped(adapter, adapter.chain())(adapter.tensor(x), adapter.tensor(y))
        return float(loss.reduce_mean())

    without = loss()
    tf.config.optimizer.set_jit(True)
    try:
        np.testing.assert_allclose(loss(), without, rtol=1e-5)
    finally:
        tf.config.optimizer.set_jit(False)


@tensorflow_case("smp.step", "StepOutput", worlds=("alone", "pipeline"))
def variables_that_are_returned_become_step_outputs(adapter: Any) -> None:
    tf, model = adapter.tf, adapter.model()
    variable = tf.Variable([1.0, 2.0])

    @adapter.smp.step
    def body(x: Any) -> Any:
        return model(x), variable

    _, got = body(adapter.tensor(adapter.batch(8)))
    assert isinstance(got, adapter.smp.StepOutput)
    assert len(got.outputs) == adapter.config.microbatches
    np.testing.assert_allclose(adapter.array(got.reduce_mean()), [1.0, 2.0])


@tensorflow_case("smp.step", worlds=("alone", "pipeline"))
def methods_can_be_steps(adapter: Any) -> None:
    smp, model, x = adapter.smp, adapter.model(), adapter.batch(8)

    class Trainer:
        @smp.step
        def forward(self, x: Any) -> Any:
            return model(x)

    got = adapter.array(Trainer().forward(adapter.tensor(x)).concat())
    np.testing.assert_allclose(got, adapter.reference(x), atol=1e-6)


@tensorflow_case("tensorflow.step_function.4", "common.data_consistency", worlds=("both", "spread"))
def replicas_shuffle_their_own_data_and_share_it_inside(adapter: Any) -> None:
    """A data set seeded with the data-parallel rank, without an incomplete last batch."""
    smp, tf, model = adapter.smp, adapter.tf, adapter.model()
    examples = adapter.batch(20)
    data = tf.data.Dataset.from_tensor_slices(examples)
    data = data.shuffle(20, seed=smp.dp_rank()).batch(8, drop_remainder=True)

    @smp.step
    def body(x: Any) -> Any:
        return model(x)

    found = []
    for x in data:
        got = adapter.array(body(x).concat())
        np.testing.assert_allclose(got, adapter.reference(x.numpy()), atol=1e-6)
        found.append(got)
    assert len(found) == 2
    for other in smp.allgather(found, smp.PP_GROUP):
        np.testing.assert_array_equal(other, found)
    orders = smp.allgather(found, smp.DP_GROUP)
    assert not np.array_equal(orders[0], orders[1])


@tensorflow_case("smp.step", worlds=("alone", "pipeline"))
def a_body_draws_the_same_on_all_ranks(adapter: Any) -> None:
    """What is added to the input is what all partitions find there."""
    smp, tf, model, x = adapter.smp, adapter.tf, adapter.model(), adapter.batch(8)

    @smp.step
    def body(x: Any) -> Any:
        noise = tf.random.normal(tf.shape(x))
        return model(x + noise), noise

    outputs, noise = body(adapter.tensor(x))
    drawn = adapter.array(noise.concat())
    np.testing.assert_allclose(
        adapter.array(outputs.concat()), adapter.reference(x + drawn), atol=1e-5
    )
    for other in smp.allgather(drawn, smp.PP_GROUP):
        np.testing.assert_array_equal(other, drawn)
    assert not np.allclose(drawn[:2], drawn[2:4])
