"""Bodies that meet the state of a model between its calls, see ``tf_beside``.

Generated: which half has the state, what the body does to it, and when. Each body is run with every
pair of calls: those that only read the state, and those that change it.
"""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import rows
from tf_users import dense, model_of

#: What a body does to the state, given what it has computed so far.
ACCESSES = {
    "reads": lambda state, known: tf.convert_to_tensor(state) * 1.0,
    "gathers": lambda state, known: tf.gather(state, tf.cast(0.0 * known, tf.int32)),
    "writes": lambda state, known: state.assign(0.5 * tf.convert_to_tensor(state) + 1.0),
}
MOMENTS = ("before", "between", "after")
WAYS = [
    *itertools.product((0, 1), ACCESSES, MOMENTS),
    *itertools.product((0, 1), ("leaves",), ("ever",)),
]


class _Following(tf.keras.layers.Layer):  # type: ignore[misc]
    """Scales by a state, which follows what it sees in training."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(name="seen", shape=(2,), initializer="zeros", trainable=False)
        self.built = True

    def call(self, x: Any, training: Any = None) -> Any:
        if training:
            self.seen.assign(0.5 * tf.convert_to_tensor(self.seen) + tf.reduce_mean(x))
        return x * (1.0 + tf.convert_to_tensor(self.seen)[0])


def meeting(side: Side, half: int, access: str, moment: str) -> Found:
    """A body that does this at that moment, for each pair of calls."""

    def call(model: Any, x: Any, training: Any) -> Any:
        for number, layer in enumerate((model.first, model.second)):
            with side.part(number):
                x = layer(x)
                if number == half:
                    x = model.state(x, training=training)
        return x

    model = model_of(
        side,
        call,
        first=dense("first"),
        second=dense("second"),
        state=lambda: _Following(name="state"),
    )
    side.step(lambda x: model(x, training=False))(rows())
    state = model.state.seen
    # Elsewhere it has no value, and the body leaves it alone.
    is_here = any(each is state for each in model.variables)
    same: list[Any] = []
    own: dict[str, Any] = {}
    for pair in itertools.product((False, True), repeat=2):

        @side.step
        def compute(x: Any, pair: Any = pair) -> Any:
            found = []

            def meet(now: str, known: Any) -> None:
                if is_here and now == moment:
                    found.append(ACCESSES[access](state, known))

            meet("before", x[0, 0])
            with tf.GradientTape() as tape:
                one = model(x + 1.0, training=pair[0])
                meet("between", one[0, 0])
                other = model(x, training=pair[1])
                loss = tf.reduce_mean(tf.square(one)) + tf.reduce_mean(other)
            gradients = tape.gradient(loss, model.trainable_variables)
            meet("after", tf.reduce_sum(gradients[0]))
            return gradients, loss, [tf.convert_to_tensor(each) for each in found]

        for step in range(2):
            gradients, loss, found = compute(rows(step))
            same.append(loss.stack())
            own |= {f"{pair} {step} {n}": each.stack() for n, each in enumerate(found)}
            for each, variable in zip(gradients, model.trainable_variables, strict=True):
                variable.assign_sub(0.1 * each.accumulate())
    return Found(same, own | by_name(model.variables, model.variables))
