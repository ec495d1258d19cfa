"""Layers, functions and precisions as users write them in a call, see ``tf_beside``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf
from making import given, numbers, tokens
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import IS_KERAS_3, dense, model_of, of_layers, train

L = tf.keras.layers
TIMES = 5


def nested_models(side: Side) -> Found:
    """A functional model in a sequential one in a subclassed one, each with weights."""
    inputs = tf.keras.Input((WIDTH,))
    inner = tf.keras.Model(inputs, L.Add()([inputs, L.Dense(WIDTH, "tanh", name="deep")(inputs)]))
    middle = tf.keras.Sequential([L.Dense(WIDTH, "relu", name="before"), inner], name="middle")

    class Outer(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="outer")
            self.middle, self.last = middle, L.Dense(WIDTH, name="after")

        def call(self, x: Any) -> Any:
            return self.last(self.middle(x))

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.outer(x)
        with side.part(1):
            return model.head(x)

    return train(side, model_of(side, call, outer=Outer, head=dense("head")), rows())


def shared_across_partitions(side: Side) -> Found:
    """One layer that both halves call, and one weight that another layer takes over."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.between(model.shared(x))
        with side.part(1):
            x = model.head(model.shared(x))
        with side.part(0):
            return tf.matmul(x, tf.convert_to_tensor(model.between.kernel), transpose_b=True)

    layers = {name: dense(name) for name in ("shared", "between", "head")}
    return train(side, model_of(side, call, **layers), rows(), tf.keras.optimizers.Adam(0.05))


def unused_layers(side: Side) -> Found:
    """Layers that no loss depends on, and a variable without a reader."""

    class Spare(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.spare = self.add_weight(name="spare", shape=(3,), initializer="ones")
            self.built = True

        def call(self, x: Any) -> Any:
            return x

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.spare(model.first(x))
            model.unused(x)
        with side.part(1):
            model.late(x)
            return model.second(x)

    layers = {name: dense(name) for name in ("first", "unused", "late", "second")}
    return train(side, model_of(side, call, spare=lambda: Spare(name="spare"), **layers), rows())


def layers_in_containers(side: Side) -> Found:
    """Layers in dicts, tuples and lists of lists, chosen by a name in the call."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.named["b"](model.named["a"](x))
        with side.part(1):
            for group in model.groups:
                x = sum(layer(x) for layer in group)
            return x

    model = model_of(
        side,
        call,
        named=lambda: {name: dense(name)() for name in ("a", "b")},
        groups=lambda: [[dense("c")(), dense("d")()], [dense("e")()]],
    )
    return train(side, model, rows())


def layers_in_branches(side: Side) -> Found:
    """``tf.cond`` and a loop around layers that have variables."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: model.first(x), lambda: model.other(x))
        with side.part(1):
            turns = tf.cast(tf.reduce_sum(x) > 0.0, tf.int32) + 1
            looped = (tf.constant(0), x)
            return tf.while_loop(
                lambda n, _: n < turns, lambda n, y: (n + 1, model.second(y)), looped
            )[1]

    model = model_of(side, call, first=dense("first"), other=dense("other"), second=dense("second"))
    x = rows()
    for layer in (model.first, model.other, model.second):
        layer.build((None, WIDTH))
    return train(side, model, x)


def call_by_its_name(side: Side) -> Found:
    """``layer.call`` instead of ``layer``, and a model whose class calls its parent's ``call``."""

    class Parent(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="model")
            self.first, self.second = dense("first")(), dense("second")()
            for layer in (self.first, self.second):
                layer.build((None, WIDTH))

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                return self.first.call(x)

    class Child(Parent):
        def call(self, x: Any, training: Any = None) -> Any:
            x = super().call(x, training=training)
            with side.part(1):
                return self.second.call(x)

    return train(side, Child(), rows())


def lambdas(side: Side) -> Found:
    """Lambda layers, bare operations in a functional model, and slices."""
    inputs = tf.keras.Input((WIDTH,))
    x = L.Dense(8, name="first")(inputs)
    x = L.Lambda(lambda each: tf.tanh(each) * 2.0)(x)
    y = L.Concatenate()([x[:, :4], L.Lambda(tf.abs)(x)[:, 4:]])
    model = tf.keras.Model(inputs, L.Dense(2, name="second")(x * y + 1.0))
    return train(side, given(side, model), rows())


def normalisations(side: Side) -> Found:
    """Normalisations of all kinds, in all places, some frozen, some always training."""
    frozen = L.BatchNormalization(name="frozen")
    frozen.trainable = False
    norms = [
        L.BatchNormalization(name="first_of_all"),
        L.Dense(6, name="one"),
        L.LayerNormalization(name="layers"),
        frozen,
        L.TimeDistributed(L.BatchNormalization(name="inner"), name="over_time"),
        L.Dense(6, name="other"),
        L.UnitNormalization(),
        L.BatchNormalization(momentum=0.5, center=False, name="last"),
    ]
    if hasattr(L, "GroupNormalization"):
        norms.insert(4, L.GroupNormalization(3, name="groups"))
    model = of_layers(side, *norms)
    found = train(side, model, numbers(3, WIDTH))
    return Found(found.same, found.own | by_name(model.variables, model.variables))


def ragged_inside(side: Side) -> Found:
    """Ragged tensors made and used in the call, and boolean masks."""

    def call(model: Any, x: Any, training: Any) -> Any:
        lengths = tf.reduce_sum(tf.cast(x > 0, tf.int32), -1)
        with side.part(0):
            x = tf.RaggedTensor.from_tensor(model.table(x), lengths)
            means = tf.reduce_sum(x, 1) / (1.0 + tf.cast(lengths, tf.float32)[:, tf.newaxis])
            longest = tf.reduce_max(tf.boolean_mask(means, lengths > 1), 0)
        with side.part(1):
            return model.head(means + longest)

    table = {"table": lambda: L.Embedding(4, WIDTH, name="table")}
    model = model_of(side, call, head=dense("head"), **table)
    return train(side, model, tokens(4, TIMES))


def sparse_inside(side: Side) -> Found:
    """Sparse tensors made and used in the call, and sparse look-ups."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            sparse = tf.sparse.from_dense(tf.nn.relu(x))
            y = tf.sparse.sparse_dense_matmul(sparse, tf.convert_to_tensor(model.first.kernel))
            y = model.first(y)
        with side.part(1):
            places = tf.sparse.from_dense(tf.cast(x > 0.0, tf.int64))
            found = tf.nn.embedding_lookup_sparse(
                tf.convert_to_tensor(model.second.kernel), places, None, combiner="sum"
            )
            return model.second(y)[: tf.shape(found)[0]] + found

    model = model_of(side, call, first=dense("first"), second=dense("second"))
    for layer in (model.first, model.second):
        layer.build((None, WIDTH))
    batch = tf.abs(rows())
    return train(side, model, batch)


def functions_of_python(side: Side) -> Found:
    """``tf.py_function`` with its gradient, and ``tf.numpy_function`` without, in the call."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
            y = tf.ensure_shape(tf.py_function(lambda each: each * each, [x], tf.float32), x.shape)
        with side.part(1):
            order = tf.numpy_function(lambda each: each.argsort(-1), [y], tf.int64, stateful=False)
            return tf.gather(model.second(y), tf.ensure_shape(order, x.shape), batch_dims=1)

    return train(side, model_of(side, call, first=dense("first"), second=dense("second")), rows())


def checks_and_prints(side: Side) -> Found:
    """Assertions, prints, names, devices and control dependencies in the call."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0), tf.name_scope("scope"):
            tf.debugging.assert_rank(x, 2)
            tf.debugging.assert_all_finite(x, "finite")
            x = tf.debugging.check_numerics(model.first(x), "numbers")
            check = tf.debugging.assert_less(x, 2.0)
            with tf.control_dependencies([check] if check is not None else []):
                x = tf.identity(x)
        with side.part(1), tf.device("/CPU:0"):
            tf.print("seen", tf.shape(x), output_stream="file:///dev/null")
            tf.Assert(tf.reduce_all(x < 2.0), [x])
            return model.second(x)

    return train(side, model_of(side, call, first=dense("first"), second=dense("second")), rows())


def signatures(side: Side) -> Found:
    """Functions inside with an input signature, of any shape, and nested in one another."""

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH])])  # type: ignore[untyped-decorator]
    def any_rows(x: Any) -> Any:
        return tf.sin(x) + tf.reduce_mean(x)

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def both(x: Any, y: Any) -> Any:
        return any_rows(x) * any_rows(tf.concat([y, x], 0))[: tf.shape(y)[0]]

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            y = both(model.first(x), x)
        with side.part(1):
            return model.second(both(y, x))

    return train(side, model_of(side, call, first=dense("first"), second=dense("second")), rows())


def products(side: Side) -> Found:
    """Einsum, dot, bilinear attention and one weight normed by hand."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            y = model.einsum(x)
            scores = model.dot([x, y])
        with side.part(1):
            kernel = tf.convert_to_tensor(model.head.kernel)
            return scores @ x + model.head(y) / tf.norm(kernel)

    model = model_of(
        side,
        call,
        einsum=lambda: L.EinsumDense("abc,cd->abd", (None, WIDTH), bias_axes="d", name="einsum"),
        dot=lambda: L.Dot(axes=2, normalize=True),
        head=dense("head"),
    )
    model.head.build((None, TIMES, WIDTH))
    return train(side, model, numbers(TIMES, WIDTH))


def loaded(side: Side) -> Found:
    """A model that was saved and loaded, and then cloned by its configuration."""
    tf.keras.utils.set_random_seed(3)
    inputs = tf.keras.Input((WIDTH,))
    x = L.BatchNormalization(name="norm")(L.Dense(6, "tanh", name="first")(inputs))
    model = tf.keras.Model(inputs, L.Dense(2, name="second")(x))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.keras"))
        model.save(path)
        model = tf.keras.models.load_model(path)
    weights = model.get_weights()
    model = type(model).from_config(model.get_config())
    model.set_weights(weights)
    return train(side, given(side, model), rows())


def _seeded(side: Side, *layers: Any) -> Found:
    """Trains layers of which some draw from seeds."""
    return train(side, of_layers(side, *layers), numbers(6, 6, 3))


def augmentation(side: Side) -> Found:
    """Images turned, shifted and flipped, and dropout, all with seeds."""
    return _seeded(
        side,
        L.Rescaling(0.5),
        L.RandomFlip(seed=1),
        L.RandomTranslation(0.2, 0.2, fill_mode="nearest", seed=2),
        L.RandomRotation(0.1, seed=3),
        L.Conv2D(4, 3, name="one"),
        L.SpatialDropout2D(0.3, seed=4),
        L.Flatten(),
        L.Dense(6, name="two"),
        L.GaussianNoise(0.1, seed=5),
        L.Dropout(0.5, seed=6),
        L.Dense(3, name="three"),
    )


def half_precision(side: Side) -> Found:
    """Layers in float16 around one in float32."""
    policy = "mixed_float16"
    model = of_layers(
        side,
        dense("one", dtype=policy)(),
        dense("two", dtype="float32")(),
        dense("three", dtype=policy)(),
    )
    return train(side, model, rows())


def double_precision(side: Side) -> Found:
    """Everything in float64, the inputs too."""
    model = of_layers(side, *(dense(name, dtype="float64")() for name in ("one", "two", "three")))
    batch = tf.cast(rows(), tf.float64)
    return train(side, model, batch, loss_of=lambda y: tf.reduce_mean(tf.square(y - 0.3)))


#: What gives the numbers of TensorFlow.
NAMES = (
    "nested_models",
    "shared_across_partitions",
    "unused_layers",
    "layers_in_containers",
    "layers_in_branches",
    "call_by_its_name",
    "lambdas",
    "normalisations",
    "ragged_inside",
    "sparse_inside",
    "functions_of_python",
    "checks_and_prints",
    "signatures",
    "products",
    "loaded",
    "half_precision",
    "double_precision",
    # Keras 2 draws these from TensorFlow's generator, which the library keys by microbatch.
    *(("augmentation",) if IS_KERAS_3 else ()),
)
