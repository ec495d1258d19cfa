"""TensorFlow: gradients inside step functions, and what is done with them outside."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from conformance.adapters import adapter_of
from conformance.adapters.base import Array
from conformance.cases.common.starting import quickly
from conformance.registry import tensorflow_case
from smdistributed.modelparallel.common.testing import run_ranks

_SOME = ("alone", "pipeline", "manual")


def plain_gradients(adapter: Any, x: Array, y: Array) -> tuple[float, list[Array]]:
    """Returns loss and gradients of the whole batch, with TensorFlow alone."""
    tf, model = adapter.tf, adapter.plain()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(tf.constant(x)) - tf.constant(y)))
    found = tape.gradient(loss, model.trainable_variables)
    return float(loss), [adapter.array(each) for each in found]


def by_tape(adapter: Any, loss: Any, variables: Any, tape: Any) -> Any:
    """Asks a tape, the way of today's scripts."""
    return tape.gradient(loss, variables)


def by_graph(adapter: Any, loss: Any, variables: Any, tape: Any) -> Any:
    """Asks the graph."""
    return adapter.tf.gradients(loss, [_variable(each) for each in variables])


def by_compute_gradients(adapter: Any, loss: Any, variables: Any, tape: Any) -> Any:
    """Asks an optimizer of TensorFlow 1."""
    optimizer = adapter.tf.compat.v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss, [_variable(each) for each in variables])
    return [gradient for gradient, _ in pairs]


def by_get_gradients(adapter: Any, loss: Any, variables: Any, tape: Any) -> Any:
    """Asks an optimizer of Keras 2; later ones have no such method."""
    optimizer = adapter.tf.keras.optimizers.legacy.SGD(0.1)
    return optimizer.get_gradients(loss, variables)


def _variable(variable: Any) -> Any:
    """Returns TensorFlow's variable of one of Keras 3."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def _has_get_gradients(adapter: Any) -> bool:
    try:
        return hasattr(adapter.tf.keras.optimizers.legacy.SGD(0.1), "get_gradients")
    except (AttributeError, ImportError):
        return False


def stepped(adapter: Any, model: Any, ask: Any = by_tape) -> Any:
    """Returns a step function for gradients and loss of a model."""
    tf = adapter.tf

    @adapter.smp.step
    def body(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            predictions = model(x, training=True)
            loss = tf.reduce_mean(tf.square(predictions - y))
        return ask(adapter, loss, model.trainable_variables, tape), loss, predictions

    return body


def _agree(adapter: Any, ask: Any) -> None:
    model, x, y = adapter.chain(), adapter.batch(8), adapter.batch(8, seed=1)
    body = stepped(adapter, model, ask)
    # Which variables are here is known after the first call.
    body(adapter.tensor(x), adapter.tensor(y))
    gradients, loss, _ = body(adapter.tensor(x), adapter.tensor(y))
    assert len(gradients) == len(model.trainable_variables)
    assert all(isinstance(each, adapter.smp.StepOutput) for each in gradients)
    wanted_loss, wanted = plain_gradients(adapter, x, y)
    np.testing.assert_allclose(float(loss.reduce_mean()), wanted_loss, rtol=1e-5)
    means = [each.reduce_mean() for each in gradients]
    own = adapter.gradients_by_place(model, means)
    for place, gradient in own.items():
        np.testing.assert_allclose(gradient, wanted[place], atol=1e-6)
    assert sorted(own) == list(range(len(wanted)))  # each process has the whole model's


@tensorflow_case("tensorflow.step_function.0", "smp.step", worlds=_SOME)
def gradients_come_from_a_tape(adapter: Any) -> None:
    _agree(adapter, by_tape)


@tensorflow_case("tensorflow.step_function.0", worlds=("alone", "pipeline"))
def gradients_come_from_the_graph(adapter: Any) -> None:
    _agree(adapter, by_graph)


@tensorflow_case("tensorflow.step_function.0", worlds=("alone", "pipeline"))
def gradients_come_from_compute_gradients(adapter: Any) -> None:
    _agree(adapter, by_compute_gradients)


@tensorflow_case("tensorflow.step_function.0", worlds=("alone", "pipeline"))
def gradients_come_from_get_gradients(adapter: Any) -> None:
    """Where Keras has it."""
    if _has_get_gradients(adapter):
        _agree(adapter, by_get_gradients)


@tensorflow_case("tensorflow.step_function.0", "smp.step", worlds=("alone", "pipeline"))
def the_first_call_gives_gradients_too(adapter: Any) -> None:
    """Scripts apply what the first call returns to ``model.trainable_variables``."""
    model, x, y = adapter.chain(), adapter.batch(8), adapter.batch(8, seed=1)
    gradients, _, _ = stepped(adapter, model)(adapter.tensor(x), adapter.tensor(y))
    assert len(gradients) == len(model.trainable_variables)
    own = adapter.gradients_by_place(model, [each.accumulate() for each in gradients])
    _, wanted = plain_gradients(adapter, x, y)
    for place, gradient in own.items():
        np.testing.assert_allclose(gradient, wanted[place], atol=1e-6)


def _trained_plainly(adapter: Any, steps: int, x: Array, y: Array) -> tuple[list[float], Array]:
    """Returns the losses, and the outputs after training, with TensorFlow alone."""
    tf, model = adapter.tf, adapter.plain()
    optimizer, losses = tf.keras.optimizers.Adam(0.05), []
    model(tf.constant(x))
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tf.constant(x)) - tf.constant(y)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses, adapter.array(model(tf.constant(x)))


def _trained(adapter: Any, reduce: str, is_compiled: bool) -> None:
    tf = adapter.tf
    model, x, y = adapter.chain(), adapter.batch(8), adapter.batch(8, seed=1)
    optimizer, body = tf.keras.optimizers.Adam(0.05), stepped(adapter, model)

    def train(x: Any, y: Any) -> Any:
        gradients, loss, predictions = body(x, y)
        means = [getattr(each, reduce)() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean(), predictions.merge()

    train = tf.function(train) if is_compiled else train
    losses = []
    for _ in range(4):
        loss, predictions = train(adapter.tensor(x), adapter.tensor(y))
        losses.append(float(loss))
    wanted, _ = _trained_plainly(adapter, 4, x, y)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    _, before_last = _trained_plainly(adapter, 3, x, y)
    np.testing.assert_allclose(adapter.array(predictions), before_last, atol=1e-4)


@tensorflow_case("tensorflow.step_function.1", "StepOutput.accumulate", worlds=_SOME)
def training_in_one_function_is_that_of_one_process(adapter: Any) -> None:
    _trained(adapter, "accumulate", is_compiled=True)


@tensorflow_case("tensorflow.step_function.1", "StepOutput.reduce_mean", worlds=("pipeline",))
def means_train_alike(adapter: Any) -> None:
    _trained(adapter, "reduce_mean", is_compiled=True)


@tensorflow_case("tensorflow.step_function.1", worlds=("alone", "pipeline"))
def training_without_a_function_is_the_same(adapter: Any) -> None:
    _trained(adapter, "accumulate", is_compiled=False)


@tensorflow_case("config.C07", "StepOutput.reduce_mean", worlds=("alone", "pipeline"))
def means_of_uneven_microbatches_are_those_of_the_batch(adapter: Any) -> None:
    model, x, y = adapter.chain(), adapter.batch(11), adapter.batch(11, seed=1)
    gradients, loss, _ = stepped(adapter, model)(adapter.tensor(x), adapter.tensor(y))
    wanted_loss, wanted = plain_gradients(adapter, x, y)
    np.testing.assert_allclose(float(loss.reduce_mean()), wanted_loss, rtol=1e-5)
    for way in ("reduce_mean", "accumulate"):
        means = [getattr(each, way)() for each in gradients]
        for place, gradient in adapter.gradients_by_place(model, means).items():
            np.testing.assert_allclose(gradient, wanted[place], atol=1e-6)


@tensorflow_case("StepOutput.accumulate(var)", "StepOutput.accumulate", worlds=("pipeline",))
def accumulate_takes_a_variable_of_the_caller(adapter: Any) -> None:
    tf, model, x = adapter.tf, adapter.model(), adapter.batch(8)

    @adapter.smp.step
    def body(x: Any) -> Any:
        return model(x)

    output = body(adapter.tensor(x))
    wanted = np.mean(np.split(adapter.reference(x), adapter.config.microbatches), axis=0)
    into = tf.Variable(tf.ones(wanted.shape))
    for _ in range(2):  # what was in it does not count
        got = output.accumulate("variable", into)
        np.testing.assert_allclose(adapter.array(got), wanted, atol=1e-6)
        np.testing.assert_allclose(adapter.array(into), wanted, atol=1e-6)
    for method in ("add_n", "accumulate_n"):
        into.assign(tf.zeros(wanted.shape))
        np.testing.assert_allclose(
            adapter.array(output.accumulate(method, into)), wanted, atol=1e-6
        )
        assert not adapter.array(into).any()
    for wrong in (tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros(wanted.shape, tf.float64))):
        with pytest.raises(Exception, match=r"shape|dtype"):
            output.accumulate("variable", wrong)


@tensorflow_case("tensorflow.step_function.2", "smp.step", worlds=("alone", "pipeline"))
def a_step_without_the_model_is_refused(adapter: Any) -> None:
    adapter.model()

    @adapter.smp.step
    def body(x: Any) -> Any:
        return x * 2.0

    with pytest.raises(Exception, match="model"):
        body(adapter.tensor(adapter.batch(8)))


def ignore_the_model() -> tuple[float, str]:
    """Calls the model in a step and returns something else; tells how long that took, and why not.

    A job of its own: a transfer that waits in vain can leave the others waiting too.
    """
    adapter: Any = adapter_of("tensorflow")
    timeout = 10
    adapter.smp.init(
        {"pipeline_parallel_degree": 2, "microbatches": 4, "communication_timeout": timeout}
    )
    model, x, said = adapter.model(), adapter.batch(8), ""

    @adapter.smp.step
    def body(x: Any) -> Any:
        model(x)
        return x * 2.0

    started = time.monotonic()
    try:
        output = body(adapter.tensor(x))
        np.testing.assert_allclose(adapter.array(output.concat()), x * 2, atol=1e-6)
    except Exception as error:
        said = str(error)
    return (time.monotonic() - started) / timeout, said


@tensorflow_case("tensorflow.step_function.2", worlds=("new",), starts_jobs=True)
def a_result_that_ignores_the_model_is_refused_or_right(adapter: Any) -> None:
    """Nobody may wait for a transfer that does not come."""
    for part, said in run_ranks(2, ignore_the_model, **quickly(adapter)).results:
        assert part < 1, said
        assert not said or "DistributedModel" in said, said
