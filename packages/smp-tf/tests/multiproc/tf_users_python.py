"""Models with what Python, AutoGraph and gradients do, as users write them, see ``tf_beside``."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import dense, model_of, train

L = tf.keras.layers


def autograph(side: Side) -> Found:
    """Loops and branches that AutoGraph makes of Python."""

    @tf.function  # type: ignore[untyped-decorator]
    def counted(x: Any) -> Any:
        for i in tf.range(3):
            if tf.reduce_sum(x) > 0.0:
                x = x * 0.9
            elif i > 0:
                x = x + tf.cast(i, tf.float32) * 0.1
        return x

    @tf.function  # type: ignore[untyped-decorator]
    def repeated(layer: Any, x: Any) -> Any:
        while tf.reduce_max(tf.abs(x)) > 0.2:
            x = layer(x) * 0.5
        return x

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = counted(model.first(x))
        with side.part(1):
            return repeated(model.second, model.second(x))

    return train(side, model_of(side, call, first=dense("first"), second=dense("second")), rows())


def scans(side: Side) -> Found:
    """``map_fn``, ``scan``, ``foldl``, ``vectorized_map`` and ``switch_case``."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = tf.map_fn(lambda row: tf.tanh(row) * 2.0, model.first(x))
            x = tf.scan(lambda a, b: 0.5 * a + b, x)
        with side.part(1):
            x = model.second(tf.vectorized_map(lambda row: row * tf.reduce_sum(row), x))
            total = tf.foldl(lambda a, b: a + b, x)
            place = tf.cast(tf.reduce_sum(x) > 0.0, tf.int32)
            return x + tf.switch_case(place, [lambda: total * 2.0, lambda: total * 3.0])

    return train(side, model_of(side, call, first=dense("first"), second=dense("second")), rows())


def arguments_of_python(side: Side) -> Found:
    """Numbers, words and flags in a call, other ones in each step."""

    class Model(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="model")
            self.first, self.second = dense("first")(), dense("second")()

        def call(self, x: Any, factor: float = 1.0, mode: str = "a", training: Any = None) -> Any:
            with side.part(0):
                x = self.first(x) * factor
            with side.part(1):
                x = self.second(x)
                return tf.sin(x) if mode == "sine" else x

    model = Model()

    @side.step
    def compute(x: Any, factor: float, mode: str) -> Any:
        return tf.reduce_sum(model(x, factor=factor, mode=mode))

    calls = [(1.0, "a"), (2.0, "a"), (2, "sine"), (1.0, "sine"), (1.0, "a")]
    return Found([compute(rows(), factor, mode).reduce_sum() for factor, mode in calls], {})


class Result(NamedTuple):
    """What a model returns."""

    logits: Any
    extra: Any


def results_of_many_kinds(side: Side) -> Found:
    """Nested results with None, integers, flags and ragged parts."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
            best = tf.argmax(x, -1)
        with side.part(1):
            y = model.second(x)
            return Result(y, {"best": best, "large": y > 0.1, "none": None, "pair": (x, [y * 2.0])})

    model = model_of(side, call, first=dense("first"), second=dense("second"))

    @side.step
    def compute(x: Any) -> Any:
        found = model(x)
        assert isinstance(found, Result)
        assert found.extra["none"] is None
        extra = {key: value for key, value in found.extra.items() if value is not None}
        return tuple(tf.nest.flatten((found.logits, extra)))

    return Found([each.merge() for each in compute(rows())], {})


def tf_functions_inside(side: Side) -> Found:
    """The call of the model is a ``tf.function``, and layers have some of their own."""

    inner = tf.function(lambda x: tf.tanh(x) * 2.0)

    class Layer(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(name="w", shape=(WIDTH,), initializer="ones")
            self.built = True

        @tf.function  # type: ignore[untyped-decorator]
        def call(self, x: Any) -> Any:
            return inner(x) * self.w

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.one(model.first(x))
        with side.part(1):
            return model.other(model.second(x))

    return train(
        side,
        model_of(
            side,
            call,
            first=dense("first"),
            one=lambda: Layer(name="one"),
            second=dense("second"),
            other=lambda: Layer(name="other"),
        ),
        rows(),
    )


def compiled_by_xla(side: Side) -> Found:
    """A function inside the model that XLA compiles."""
    fused = tf.function(lambda x: tf.tanh(x) * tf.sigmoid(x) + 1.0, jit_compile=True)

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = fused(model.first(x))
        with side.part(1):
            return model.second(fused(x))

    return train(side, model_of(side, call, first=dense("first"), second=dense("second")), rows())


def custom_gradients(side: Side) -> Found:
    """A gradient of one's own with variables, and one that notes something in a variable."""
    seen = tf.Variable(0.0, trainable=False, name="seen")

    class Scaled(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(name="w", shape=(WIDTH,), initializer="ones")
            self.built = True

        def call(self, x: Any) -> Any:
            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def scaled(x: Any) -> Any:
                y = x * self.w

                def gradient(dy: Any, variables: Any = None) -> Any:
                    return dy * self.w * 0.5, [
                        tf.reduce_sum(dy * x, 0) * 2.0 for _ in variables or []
                    ]

                return y, gradient

            return scaled(x)

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.scaled(model.first(x))
        with side.part(1):
            return model.second(x)

    model = model_of(
        side,
        call,
        first=dense("first"),
        scaled=lambda: Scaled(name="scaled"),
        second=dense("second"),
    )
    found = train(side, model, rows())
    return Found([*found.same, seen], found.own)


def effects_of_gradients(side: Side) -> Found:
    """A gradient that counts in a variable of the model how large it was."""

    class Counting(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)
            self.built = True

        def call(self, x: Any) -> Any:
            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def noting(x: Any) -> Any:
                def gradient(dy: Any) -> Any:
                    self.seen.assign(0.5 * self.seen)
                    self.seen.assign_add(tf.reduce_sum(tf.abs(dy)))
                    return dy

                return tf.identity(x), gradient

            return noting(x)

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.one(model.first(x))
        with side.part(1):
            return model.other(model.second(x))

    model = model_of(
        side,
        call,
        first=dense("first"),
        one=lambda: Counting(name="one"),
        second=dense("second"),
        other=lambda: Counting(name="other"),
    )
    found = train(side, model, rows())
    return Found(found.same, found.own | by_name(model.variables, model.variables))


def _called(side: Side, apply: Any) -> Found:
    """Trains a model that the body of a step calls in some place."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    model = model_of(side, call, first=dense("first"), second=dense("second"))
    if side.base is tf.keras.Model:
        model(rows())

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = apply(model, x)
            loss = tf.reduce_sum(tf.square(y))
        return tape.gradient(loss, model.trainable_variables), loss, y

    same, optimizer = [], tf.keras.optimizers.SGD(0.01)
    for _ in range(2):
        gradients, loss, y = compute(rows())
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        same += [loss.stack(), y.merge()]
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def called_in_loops_and_branches(side: Side) -> Found:
    """A loop hands the model what it returned, and a branch calls it on that."""

    def apply(model: Any, x: Any) -> Any:
        y = tf.while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, model(x)), (0, x))[1]
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: model(y), lambda: model(2.0 * y) + x)

    return _called(side, apply)


def called_for_each_row(side: Side) -> Found:
    """``tf.map_fn`` in the body."""
    return _called(
        side, lambda model, x: tf.map_fn(lambda row: model(row[tf.newaxis])[0], tf.sin(x))
    )


def called_again_for_the_gradient(side: Side) -> Found:
    """``tf.recompute_grad`` around the model."""
    return _called(side, lambda model, x: tf.recompute_grad(lambda x: model(x) * 2.0)(x))


def called_in_a_function(side: Side) -> Found:
    """A ``tf.function`` in the body."""
    function = tf.function(lambda model, x: model(x))
    return _called(side, function)


def vectorized(side: Side) -> Found:
    """A Jacobian of the model."""

    def apply(model: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        return tape.batch_jacobian(y, x)

    return _called(side, apply)


#: What gives the numbers of TensorFlow.
NAMES = (
    "autograph",
    "scans",
    "arguments_of_python",
    "results_of_many_kinds",
    "tf_functions_inside",
    "compiled_by_xla",
    "custom_gradients",
    "effects_of_gradients",
    "called_in_loops_and_branches",
    "called_for_each_row",
    "called_again_for_the_gradient",
)
