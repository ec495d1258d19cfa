"""Models that use each other's variables, see ``tf_beside``.

A generated population: what they share x where the first one has it x where the second one uses it
x which of them is called first x whether both train it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import dense, model_of

L = tf.keras.layers


def _built(layer: Any) -> Any:
    layer.build((None, WIDTH))
    return layer


def _stepped(layer: Any, x: Any, training: Any) -> Any:
    return layer(x, training=training)


def _scaled(layer: Any, x: Any, training: Any) -> Any:
    return x * tf.convert_to_tensor(layer.bias)


_Use = Callable[[Any, Any, Any], Any]
#: What makes the layer that is shared, and how the second model uses it.
SHARED: dict[str, tuple[Callable[[], Any], _Use]] = {
    "layer": (lambda: _built(L.Dense(WIDTH, "tanh", name="shared")), _stepped),
    "bias": (lambda: _built(L.Dense(WIDTH, "tanh", name="shared")), _scaled),
    "kernel": (
        lambda: _built(L.Dense(WIDTH, "tanh", name="shared")),
        lambda layer, x, training: tf.matmul(x, layer.kernel, transpose_b=True),
    ),
    "moments": (
        lambda: _built(L.BatchNormalization(momentum=0.5, name="shared")),
        lambda layer, x, training: x - tf.convert_to_tensor(layer.moving_mean),
    ),
    "normalisation": (
        lambda: _built(L.BatchNormalization(momentum=0.5, name="shared")),
        _stepped,
    ),
}
ALL = [
    each
    for each in itertools.product(
        SHARED, (0, 1), (0, 1), ("first", "second", "both"), (True, False)
    )
    # What no step function has placed yet is not updated, as an error says.
    if each[3] != "second" or not each[4]
]


def train(side: Side, kind: str, has: int, uses: int, begins: str, trains_both: bool) -> Found:
    """Trains two models, of which the second one uses what the first one has."""
    make, use = SHARED[kind]
    layer = make()

    def of_first(model: Any, x: Any, training: Any) -> Any:
        with side.part(has):
            x = model.shared(x, training=training)
        with side.part(1 - has):
            return model.first(x)

    def of_second(model: Any, x: Any, training: Any) -> Any:
        with side.part(1 - uses):
            x = model.second(x)
        with side.part(uses):
            return model.third(use(layer, x, training))

    # The second one has it from around it, so that it is not one of its variables.
    one = model_of(side, of_first, shared=lambda: layer, first=dense("first"))
    other = model_of(side, of_second, second=dense("second"), third=dense("third"))
    same: list[Any] = []

    def computing(models: list[Any]) -> Any:
        @side.step
        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                ends = [model(x, training=True) for model in models]
                loss = tf.add_n([tf.reduce_mean(tf.square(each - 0.3)) for each in ends])
            return tape.gradient(loss, variables_of(models)), loss

        return compute

    def variables_of(models: list[Any]) -> list[Any]:
        found = [each for model in models for each in model.trainable_variables]
        if trains_both and one not in models:
            found += layer.trainable_variables
        return found

    orders = {"first": [[one], [other]], "second": [[other], [one]], "both": [[one, other]]}
    steps = [(models, computing(models)) for models in orders[begins]]
    for number in range(3):
        for models, compute in steps:
            gradients, loss = compute(rows(number))
            pairs = zip(gradients, variables_of(models), strict=True)
            optimizer = tf.keras.optimizers.SGD(0.1)
            optimizer.apply_gradients([(g.accumulate(), v) for g, v in pairs if g is not None])
            same.append(loss.reduce_mean())
    names = by_name(one.variables, one.variables) | by_name(other.variables, other.variables)
    return Found(same, names)
