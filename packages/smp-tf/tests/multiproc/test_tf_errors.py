"""Mistakes in a script must be clear errors, on every rank, not hangs or wrong numbers."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_worlds import MICROBATCHES, TWO_BY_HAND

from smdistributed.modelparallel.common.errors import (
    CommError,
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
    expect(ConfigError, "the batch is empty", lambda: step(ones(0)))
    output = stepping(layers())(ones(5))
    sizes = [len(each) for each in np.array_split(range(5), MICROBATCHES)]
    assert [len(each) for each in output.outputs] == sizes
    assert output.weights == [size / 5 for size in sizes]
    few = MICROBATCHES - 1
    assert [len(each) for each in step(ones(few)).outputs] == [1] * few
    expect(TypeError, "where one array is needed", lambda: np.asarray(output))


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


def case_errors_keep_their_types_in_tf_functions() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    def of_an_absent_one(x: Any) -> Any:
        with smp.partition(7):
            return x * 2.0

    step, other = stepping(layers(of_an_absent_one)), stepping(layers())
    inside = tf.function(lambda x: step(x).merge())
    expect(
        ValueError, r"received 7: use one of these, or raise partitions", lambda: inside(ones(4))
    )
    empty = tf.function(lambda x: other(x).merge())
    expect(ConfigError, "the batch is empty", lambda: empty(ones(0)))


def case_what_is_no_tensor() -> None:
    """Numbers are a list, all else is that of the first microbatch, with a warning."""
    import smdistributed.modelparallel.tensorflow as smp

    model, count = layers(), iter(range(100))

    def body(x: Any) -> Any:
        number = next(count)
        return {
            "loss": model(x),
            "number": number,
            "half": np.float32(number / 2),
            "word": f"word {number % 4}",
            "same": ("a", None, True),
        }

    with pytest.warns(UserWarning, match="is that of the first microbatch"):
        found = smp.step(body)(ones(4))
    assert found["loss"].merge().shape == [4, WIDTH]
    assert found["number"] == [*range(MICROBATCHES)]
    assert found["half"] == [number / 2 for number in range(MICROBATCHES)]
    assert (found["word"], found["same"]) == ("word 0", ("a", None, True))


def case_python_counters() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    class Counting(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="counting")
            self.dense, self.calls = tf.keras.layers.Dense(2), 0

        def call(self, x: Any) -> Any:
            self.calls += 1
            return self.dense(x)

    model = Counting()
    with pytest.warns(UserWarning, match="of counting changed its attribute calls: Python in a"):
        smp.step(lambda x: model(x))(ones(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.step(lambda x: model(x))(ones(4))


def case_ragged_and_sparse_input() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    ragged = tf.RaggedTensor.from_row_lengths(tf.range(10.0), [1, 3, 0, 2, 3, 1])
    sparse = tf.sparse.from_dense(np.eye(6, WIDTH, dtype=np.float32))
    model = layers()

    @smp.step
    def step(r: Any, s: Any) -> Any:
        return model(
            tf.sparse.to_dense(s) + tf.reduce_sum(r, axis=1, keepdims=True)
        ), r.row_lengths()

    @smp.step
    def whole(x: Any) -> Any:
        return model(x)

    outputs, lengths = step(ragged, sparse)
    dense = tf.sparse.to_dense(sparse) + tf.reduce_sum(ragged, axis=1, keepdims=True)
    np.testing.assert_allclose(outputs.merge(), whole(dense).merge(), rtol=1e-6)
    assert lengths.merge().numpy().tolist() == [1, 3, 0, 2, 3, 1]
    assert len(step._compiled) == 1
    step(ragged * 2.0, sparse)
    assert len(step._compiled) == 1


def case_batches_of_many_shapes() -> None:
    """Shapes that are known in the step only travel whatever they are."""
    import smdistributed.modelparallel.tensorflow as smp

    model = layers(tf.tanh)

    @smp.step(input_signature=[tf.TensorSpec([None, None, WIDTH], tf.float32)])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x)
        return y, tape.gradient(y, model.trainable_variables)

    for lengths in ((8 * 4, 40), (9 * 4, 9), (4, 1), (5, 7), (4, 0), (8 * 4, 40)):
        y, gradients = step(tf.ones([*lengths, WIDTH]))
        assert y.merge().shape == [*lengths, WIDTH]
        bias = gradients[-1].reduce_sum().numpy()
        if smp.rank() == 1:
            assert bias.tolist() == [lengths[0] * lengths[1]] * WIDTH
        else:
            assert bias.any() == bool(lengths[1])


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
    kernel = model.first.kernel
    different = kernel.numpy() if smp.rank() == 0 else np.asarray(kernel)
    assert (different == np.asarray(kernel)).all()
    if smp.rank() == 1:
        np.asarray(kernel)
    norm = float(tf.norm(kernel))  # of one rank, which has been here when the other one comes
    assert np.isclose(norm, np.linalg.norm(different))
    for number, variable in enumerate(model.variables):
        variable.assign(tf.fill(variable.shape, float(number)))
    for number, variable in enumerate(model.variables):
        assert (np.asarray(variable) == number).all()
    smp.barrier()  # as the end of a script is, where others are answered


def case_variable_that_its_rank_has_let_go_of() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()
    stepping(model)(ones(4))
    kernel = model.first.kernel
    expected = np.asarray(kernel)
    if smp.rank() == 0:
        del model, kernel
        gc.collect()
    else:
        assert (np.asarray(kernel) == expected).all()
    smp.barrier()


def case_computed_of_a_variable_of_another_rank() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()
    step = stepping(model)
    step(ones(4))
    if smp.rank() == 1:
        reason = (
            r"rank 1 alone reads a value that is computed of layers/first/kernel \(test_tf_errors"
            r".*which rank 0 has, and which has come to a call of function"
        )
        norm = tf.function(lambda: tf.norm(tf.convert_to_tensor(model.first.kernel)))
        expect(CommError, reason, lambda: float(norm()))
    step(ones(4))


def case_what_was_before_functions_that_assign() -> None:
    """Such a function may be one process's own, so that nobody waits there for those who ask."""
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()
    step = stepping(model)
    step(ones(4))
    variable = model.first.kernel
    double = tf.function(lambda: variable.assign(2.0 * tf.convert_to_tensor(variable)))
    if smp.rank() == 1:
        expect(CommError, "was before it was changed", lambda: np.asarray(variable))
    double()
    step(ones(4))


def case_other_functions_on_ranks() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()
    steps = [stepping(model), stepping(model)]
    for step in steps:
        step(ones(4))
    reason = r"rank 0 has come to a call of function .*, rank 1 has come to a call of function"
    expect(CommError, reason, lambda: steps[smp.rank()](ones(4)))
    reason = r"rank 0 has come to a call of .*, rank 1 has come to barrier\(WORLD\) \(test_tf_err"
    expect(CommError, reason, lambda: smp.barrier() if smp.rank() else steps[0](ones(4)))
    steps[0](ones(4))


def case_models_that_differ() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    between = tf.tanh if smp.rank() else tf.sin
    step = stepping(layers(between))
    message = "the operations of layers differ between rank 0 and rank 1"
    expect(PartitionError, message, lambda: step(ones(4)))
    assert stepping(layers())(ones(4)).concat().shape == [4]


def case_batches_that_differ() -> None:
    import smdistributed.modelparallel.tensorflow as smp

    model = layers()
    step = stepping(model)
    of_other_size, of_other_type = (4 + 4 * smp.rank(), WIDTH), (tf.float32, tf.float64)[smp.rank()]
    rows = 4 // MICROBATCHES
    on_ranks = rf"\({rows}, 4\) float32 on rank 0, of \({2 * rows}, 4\) float32 on rank 1"
    message = f"given microbatches of {on_ranks}"
    expect(PartitionError, message, lambda: step(tf.ones(of_other_size)))
    on_ranks = rf"\({rows}, 4\) float32 on rank 0, of \({rows}, 4\) float64 on rank 1"
    message = f"{on_ranks}: let data depend on smp.dp"
    expect(PartitionError, message, lambda: step(tf.ones([4, WIDTH], of_other_type)))
    # Numbers are looked at when it runs; what rounding or NaN makes of them is no difference.
    named = smp.step(lambda x, ids, texts: model(x) + 0.0 * tf.cast(ids[:, None], tf.float32))
    ids, texts = tf.constant([1 << 40, 2, 3, 4], tf.int64), tf.constant(["a", "b", "c", "d"])
    other = bool(smp.rank())
    changed = {
        "x": (tf.reverse(tf.range(4.0)[:, None] * ones(4), [0] if other else []), ids, texts),
        "ids": (ones(4), ids + other, texts),
        "texts": (ones(4), ids, tf.roll(texts, int(other), 0)),
    }
    for name, batch in changed.items():
        message = f"{name} of <lambda> has other numbers on rank 1 than on rank 0"
        expect(tf.errors.InvalidArgumentError, message, lambda given=batch: named(*given))
    named((1.0 + 1e-6 * other) * ones(4), ids, texts)
    assert np.isnan(step(np.nan * ones(4)).concat()).all()
    assert step(ones(4)).concat().shape == [4]


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
        assert len(gradients) == 4


@pytest.mark.parametrize("case", cases_of(globals()))
def test_case(worlds: Worlds, case: str) -> None:
    worlds.run(TWO_BY_HAND, cases_of(globals())[case])
