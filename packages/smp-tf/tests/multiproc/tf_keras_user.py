"""The model as a user of Keras has it: its call, its variables, what tapes watch of them.

See ``tf_beside`` for what a body is.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import class_of_halves, train
from tf_worlds import MICROBATCHES

L = tf.keras.layers


def _wrapped(side: Side, model: Any) -> Any:
    if side.base is tf.keras.Model:
        return model
    import smdistributed.modelparallel.tensorflow as smp

    return smp.DistributedModel(model)


#: How a model of the user's own is called: tensors and others by place and by name.
CALLS: dict[str, Any] = {
    "by name": lambda model, x, g: model(x, gate=g, flip=True, training=False),
    "by place": lambda model, x, g: model(x, g, flip=True, training=False),
    "a tensor alone": lambda model, x, g: model(x, gate=g),
    "a flag alone": lambda model, x, g: model(x, flip=True),
    "a list": lambda model, x, g: model(x, more=[g, g], training=True),
    "a dict": lambda model, x, g: model(x, named={"a": g}, scale=2.0),
    "a word": lambda model, x, g: model(x, gate=g, mode="sum"),
    "neither": lambda model, x, g: model(x),
    "a number and none": lambda model, x, g: model(x, gate=None, flip=False, scale=0.5),
}


def called(side: Side, name: str) -> Found:
    """A model of a class of the user's own is given to the library, and called as it is written."""

    class Gated(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="gated")
            self.a, self.b = L.Dense(WIDTH, name="a"), L.Dense(WIDTH, name="b")

        def call(
            self,
            x: Any,
            gate: Any = None,
            flip: bool = False,
            more: Any = (),
            named: Any = None,
            scale: float = 1.0,
            mode: str = "product",
            training: Any = None,
        ) -> Any:
            with side.part(0):
                x = self.a(x)
            with side.part(1):
                if gate is not None:
                    x = x * gate if mode == "product" else x + gate
                for each in (*more, *(named or {}).values()):
                    x = x + each
                x = self.b(-x if flip else x) * scale
                return x * 3.0 if training else x

    model = _wrapped(side, Gated())
    compute = side.step(lambda x, g: CALLS[name](model, x, g))
    return Found([compute(rows(), rows(1)).merge()], {})


def _parts(side: Side, model: Any) -> dict[str, list[Any]]:
    """Returns variables by which gradients are asked for, wherever they live."""
    every = {
        each.name.split("/")[-1].split(":")[0] + str(place // 2): each
        for place, each in enumerate(_every(side, model))
    }
    return {
        "first": [every["kernel0"], every["bias0"]],
        "second": [every["kernel1"], every["bias1"]],
        "kernels": [every["kernel0"], every["kernel1"]],
        "one": [every["bias1"]],
    }


def _every(side: Side, model: Any) -> list[Any]:
    if side.base is tf.keras.Model:
        return list(model.trainable_variables)
    return list(model._smp_engine.everywhere()[0])


def watched(side: Side, part: str, way: str) -> Found:
    """Gradients of some variables are asked for, by tapes that may watch no others."""
    model = class_of_halves(side)()
    side.step(lambda x: model(x))(rows()) if side.base is not tf.keras.Model else model(rows())
    some = _parts(side, model)[part]

    @side.step
    def compute(x: Any) -> Any:
        if way == "no tape":
            loss = tf.reduce_mean(tf.square(model(x) - 0.3))
            return tf.gradients(loss, [_variable(each) for each in some]), loss
        with tf.GradientTape(way == "persistent", way == "watching all") as tape:
            if way != "watching all":
                tape.watch([_variable(each) for each in some])
            loss = tf.reduce_mean(tf.square(model(x) - 0.3))
        return tape.gradient(loss, some), loss

    gradients, loss = compute(rows())
    found = [None if each is None else each.accumulate() for each in gradients]
    return Found([loss.reduce_mean()], by_name(some, found))


def _variable(variable: Any) -> Any:
    return getattr(variable, "value", variable) if hasattr(tf.keras, "Variable") else variable


def weights_by_name(side: Side) -> Found:
    """``trainable_weights`` in the place of ``trainable_variables``."""
    model = class_of_halves(side)()
    losses = []
    optimizer = tf.keras.optimizers.SGD(0.1)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 0.3))
        return tape.gradient(loss, model.trainable_weights), loss

    for _ in range(2):
        gradients, loss = compute(rows())
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_weights, strict=True))
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_weights, model.trainable_weights))


WATCHED = tuple(
    itertools.product(
        ("first", "second", "kernels", "one"), ("watching", "persistent", "watching all", "no tape")
    )
)


class _Own(tf.keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="own")
        self.a, self.b = L.Dense(WIDTH), L.Dense(WIDTH)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.b(self.a(x))

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def _own_train_step(side: Side) -> None:
    _wrapped(side, _Own()).compile("sgd", "mse")


def _early_variables(side: Side) -> None:
    model = class_of_halves(side)()
    early = model.trainable_variables
    assert not early
    gradients, optimizer = _gradients(side, model), tf.keras.optimizers.SGD(0.1)
    optimizer.apply_gradients(zip([each.accumulate() for each in gradients], early, strict=False))


def _gradients(side: Side, model: Any, use: Any = lambda gradients: None) -> Any:
    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 0.3))
        gradients = tape.gradient(loss, model.trainable_variables)
        use(gradients)
        return gradients

    return compute(rows())


def _updates_in_the_body(side: Side) -> None:
    model, optimizer = class_of_halves(side)(), tf.keras.optimizers.SGD(0.1)
    train(side, model, rows(), steps=1)
    _gradients(
        side,
        model,
        lambda gradients: optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        ),
    )


def _parts_alone(side: Side) -> None:
    model, optimizer = class_of_halves(side)(), tf.keras.optimizers.SGD(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model.second(model.first(rows())) - 0.3))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def _own_backup(side: Side) -> None:
    class Own(tf.keras.callbacks.BackupAndRestore):  # type: ignore[misc]
        pass

    model = _wrapped(side, tf.keras.Sequential([tf.keras.Input((WIDTH,)), L.Dense(WIDTH)]))
    model.compile("sgd", "mse")
    backup = Own(tempfile.mkdtemp())
    model.fit(rows(), rows(), batch_size=8, callbacks=[backup], verbose=0)


def _without_accumulate(side: Side) -> None:
    model, optimizer = class_of_halves(side)(), tf.keras.optimizers.SGD(0.1)
    gradients = _gradients(side, model)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def _cloned(side: Side) -> None:
    layers = [tf.keras.Input((WIDTH,)), L.Dense(WIDTH)]
    tf.keras.models.clone_model(_wrapped(side, tf.keras.Sequential(layers)))


def _in_a_strategy(side: Side) -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        class_of_halves(side)()


#: What is refused, with the beginning of the reason.
REFUSED: dict[str, tuple[Any, str]] = {
    "own train_step": (_own_train_step, "_Own has a train_step of its own"),
    "early variables": (_early_variables, "received what it had before, none"),
    "updates in the body": (
        _updates_in_the_body,
        f"be made {MICROBATCHES} times a batch",
    ),
    "parts alone": (_parts_alone, "that no step function has placed"),
    "cloned": (_cloned, "clone the model itself"),
    "in a strategy": (_in_a_strategy, "in the scope of OneDeviceStrategy"),
    "own backup": (_own_backup, "received the class Own: use the class of Keras"),
    "without accumulate": (
        _without_accumulate,
        rf"tensor for each microbatch \({MICROBATCHES}\)",
    ),
}
