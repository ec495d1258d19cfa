"""TensorFlow: ``compile``, ``fit``, ``evaluate`` and ``predict`` of Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.registry import tensorflow_case

_ROW = "tensorflow.keras_fit"
_SOME = ("alone", "pipeline")


def _compiled(adapter: Any, model: Any) -> Any:
    optimizer = adapter.tf.keras.optimizers.SGD(0.1)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    return model


@tensorflow_case(_ROW, worlds=_SOME, is_quick=False)
def fit_trains_as_with_one_process(adapter: Any) -> None:
    x, y = adapter.batch(24), adapter.batch(24, seed=1)
    histories = [
        _compiled(adapter, model)
        .fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        .history
        for model in (adapter.chain(), adapter.plain())
    ]
    for name in ("loss", "mae"):
        np.testing.assert_allclose(histories[0][name], histories[1][name], rtol=1e-4)


@tensorflow_case(_ROW, worlds=_SOME, is_quick=False)
def evaluate_and_predict_follow_fit(adapter: Any) -> None:
    x, y = adapter.batch(16), adapter.batch(16, seed=1)
    found = []
    for model in (adapter.chain(), adapter.plain()):
        _compiled(adapter, model).fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
        numbers = model.evaluate(x, y, batch_size=8, verbose=0)
        found.append((numbers, model.predict(x, batch_size=8, verbose=0)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


@tensorflow_case(_ROW, worlds=_SOME, is_quick=False)
def fit_updates_once_a_batch(adapter: Any) -> None:
    """Microbatches add up; they are no batches."""
    model = _compiled(adapter, adapter.chain())
    model.fit(adapter.batch(24), adapter.batch(24, seed=1), batch_size=8, epochs=2, verbose=0)
    assert int(adapter.array(model.optimizer.iterations)) == 6


@tensorflow_case(_ROW, worlds=_SOME, is_quick=False)
def fit_takes_a_data_set(adapter: Any) -> None:
    tf = adapter.tf
    arrays = adapter.batch(20), adapter.batch(20, seed=1)
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(8, drop_remainder=True)
    losses = [
        _compiled(adapter, model).fit(data, epochs=2, verbose=0).history["loss"]
        for model in (adapter.chain(), adapter.plain())
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@tensorflow_case(_ROW, worlds=_SOME)
def a_last_batch_that_is_too_small_is_refused_or_right(adapter: Any) -> None:
    """One example cannot be cut into microbatches."""
    x, y = adapter.batch(9), adapter.batch(9, seed=1)
    model = _compiled(adapter, adapter.chain())
    try:
        history = model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    except Exception as error:
        # Where it is raised names microbatches, too, whatever it is: a wait for nothing, say.
        is_late = isinstance(error, adapter.tf.errors.DeadlineExceededError)
        if is_late or "microbatch" not in str(error):
            pytest.fail(f"the error does not tell of microbatches: {error}")
        return
    plain = _compiled(adapter, adapter.plain())
    wanted = plain.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=1e-4)
