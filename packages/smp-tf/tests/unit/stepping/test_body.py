"""Which results of a body would be other ones in each process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.stepping.body import Body


def _reason(result_of: Callable[[Any, Any, Any], Any]) -> str | None:
    """Looks at a body's result, made of a model's output, its gradient and one of its weights."""
    found: list[str | None] = []
    weight = tf.Variable([1.0, 2.0], name="weight")

    def body(x: Any) -> None:
        output, gradient = tf.identity_n([x])[0], tf.identity_n([2.0 * x])[0]
        trace = SimpleNamespace(variables=[weight], graph=None)
        call = SimpleNamespace(
            local=SimpleNamespace(plan=SimpleNamespace(trace=trace)),
            passes=lambda: (),
            results=output.op,
            requests=[SimpleNamespace(returned={gradient.op})],
        )
        made = Body("train", [[call]], 0)
        found.append(made.partial_result([result_of(output, gradient, weight)]))

    tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec([2]))
    (reason,) = found
    return reason


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _scaled(x: Any, weight: Any) -> Any:
    return 2.0 * x, lambda dy: (2.0 * dy, tf.reduce_sum(weight) * dy)


@pytest.mark.parametrize(
    "result_of",
    [
        lambda output, gradient, weight: tf.reduce_sum(output) + tf.nn.l2_loss(weight),
        lambda output, gradient, weight: output * tf.gather(weight, 0),
        lambda output, gradient, weight: tf.nn.l2_loss(weight),
        lambda output, gradient, weight: tf.function(lambda: tf.reduce_sum(output * weight))(),
    ],
    ids=["sum", "examples", "alone", "function"],
)
def test_losses_of_own_weights_are_refused(result_of: Any) -> None:
    assert "a result of train is computed from variable weight" in str(_reason(result_of))


@pytest.mark.parametrize(
    "result_of",
    [
        lambda output, gradient, weight: tf.reduce_sum(output),
        lambda output, gradient, weight: gradient + 0.1 * weight,
        lambda output, gradient, weight: tf.reduce_sum(gradient + 0.1 * weight),
        lambda output, gradient, weight: weight * 2.0,
        lambda output, gradient, weight: _scaled(output, tf.convert_to_tensor(weight)),
        lambda output, gradient, weight: tf.IndexedSlices(gradient, tf.constant([0, 1])),
        lambda output, gradient, weight: None,
    ],
    ids=["output", "decay", "of a number", "own", "custom gradient", "slices", "nothing"],
)
def test_what_is_of_own_weights_by_nature_is_not(result_of: Any) -> None:
    assert _reason(result_of) is None
