"""Whole training scripts as users of Keras write them, see ``tf_beside``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from making import computing, given, numbers, square, tokens
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import apply, class_of_halves, dense, model_of, two_halves

L = tf.keras.layers
ROWS = 32


def _data(width: int = 1) -> tuple[Any, Any]:
    x = np.random.RandomState(0).standard_normal((ROWS, WIDTH)).astype("float32")
    return x, (x[:, :width] > 0).astype("float32")


def _of(model: Any, same: list[Any]) -> Found:
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def _found(model: Any, *histories: Any) -> Found:
    same: list[Any] = []
    for each in histories:
        for key in sorted(each.history):
            same += [key, np.array(each.history[key], np.float32)]
    return _of(model, same)


def _means(gradients: Any) -> list[Any]:
    return [None if each is None else each.accumulate() for each in gradients]


def _halves(side: Side, name: str, width: int = WIDTH) -> Any:
    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    return model_of(
        side, call, first=dense(f"{name}_first"), second=dense(f"{name}_second", width, None)
    )


def recipe_gan(side: Side) -> Found:
    """Generator and critic, a step each, with labels that are smoothed."""
    generator, critic = _halves(side, "make"), _halves(side, "judge", 1)
    of_made, of_judged = tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.Adam(0.01)
    entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1)

    @side.step
    def judge(noise: Any, real: Any) -> Any:
        with tf.GradientTape() as tape:
            made = generator(noise, training=True)
            good, bad = critic(real, training=True), critic(made, training=True)
            loss = entropy(tf.ones_like(good), good) + entropy(tf.zeros_like(bad), bad)
        return tape.gradient(loss, critic.trainable_variables), loss

    @side.step
    def make(noise: Any) -> Any:
        with tf.GradientTape() as tape:
            made = critic(generator(noise, training=True), training=True)
            loss = entropy(tf.ones_like(made), made)
        return tape.gradient(loss, generator.trainable_variables), loss

    same = []
    for number in range(3):
        gradients, loss = judge(rows(number), rows(number + 9))
        apply(of_judged, critic, _means(gradients))
        same.append(loss.reduce_mean())
        gradients, loss = make(rows(number))
        apply(of_made, generator, _means(gradients))
        same.append(loss.reduce_mean())
    own = by_name(critic.trainable_variables, critic.trainable_variables)
    return Found(same, own | by_name(generator.trainable_variables, generator.trainable_variables))


def recipe_vae(side: Side) -> Found:
    """An autoencoder whose noise is given, with the divergence added to the loss."""

    def call(model: Any, given: Any, training: Any) -> Any:
        x, noise = given
        with side.part(0):
            mean, log = tf.split(model.encoder(x), 2, -1)
            z = mean + tf.exp(0.5 * log) * noise
        with side.part(1):
            return model.decoder(z), mean, log

    model = model_of(
        side,
        call,
        encoder=dense("encoder", 2 * WIDTH, None),
        decoder=dense("decoder", WIDTH, "sigmoid"),
    )

    def loss_of(model: Any, x: Any, noise: Any) -> Any:
        y, mean, log = model((x, noise), training=True)
        divergence = -0.5 * tf.reduce_sum(1 + log - mean**2 - tf.exp(log), -1)
        return tf.reduce_mean(tf.reduce_sum((x - y) ** 2, -1) + divergence)

    compute, optimizer, same = computing(side, model, loss_of), tf.keras.optimizers.Adam(0.01), []
    for number in range(3):
        gradients, loss = compute(rows(number), rows(number + 5))
        apply(optimizer, model, _means(gradients))
        same.append(loss.reduce_mean())
    return _of(model, same)


def recipe_vae_of_a_layer(side: Side) -> Found:
    """The divergence by ``add_loss`` in a layer, in ``fit``, with a metric of its own."""

    class Sampling(L.Layer):  # type: ignore[misc]
        def call(self, given: Any) -> Any:
            mean, log = tf.split(given, 2, -1)
            self.add_loss(-0.005 * tf.reduce_mean(1 + log - mean**2 - tf.exp(log)))
            return mean

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            z = model.sampling(model.encoder(x))
        with side.part(1):
            return model.decoder(z)

    model = model_of(
        side,
        call,
        encoder=dense("encoder", 2 * WIDTH, None),
        sampling=Sampling,
        decoder=dense("decoder", WIDTH, "sigmoid"),
    )
    model.compile("adam", "mse", metrics=[tf.keras.metrics.CosineSimilarity(name="cosine")])
    x, _ = _data()
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 2}
    return _found(model, model.fit(x, x, **options))


def recipe_triplets(side: Side) -> Found:
    """Metric learning: one tower, three calls, a margin."""
    model = two_halves(side)

    def loss_of(model: Any, a: Any, p: Any, n: Any) -> Any:
        a, p, n = (tf.math.l2_normalize(model(each, training=True), -1) for each in (a, p, n))
        near, far = tf.reduce_sum((a - p) ** 2, -1), tf.reduce_sum((a - n) ** 2, -1)
        return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))

    compute, optimizer, same = computing(side, model, loss_of), tf.keras.optimizers.SGD(0.1), []
    for number in range(3):
        gradients, loss = compute(rows(number), rows(number + 3), rows(number + 6))
        apply(optimizer, model, _means(gradients))
        same.append(loss.reduce_mean())
    return _of(model, same)


def recipe_siamese(side: Side) -> Found:
    """Two inputs through one submodel, functional, in ``fit``."""
    ends = [tf.keras.Input((WIDTH,), name=name) for name in ("one", "other")]
    tower = tf.keras.Sequential([L.Dense(WIDTH, "tanh", name="a"), L.Dense(4, name="b")], name="t")
    one, other = (tower(each) for each in ends)
    outputs = L.Dense(1, "sigmoid", name="head")(L.Subtract()([one, other]))
    model = given(side, tf.keras.Model(ends, outputs))
    model.compile(tf.keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    x, y = _data()
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 2}
    return _found(model, model.fit([x, x[::-1].copy()], y, **options))


def recipe_distiller(side: Side) -> Found:
    """The distiller of Keras's pages: a ``train_step`` with a teacher and a temperature."""
    teacher = tf.keras.Sequential([L.Dense(4, name="wise")], name="teacher")
    teacher.build((None, WIDTH))
    teacher.trainable = False

    class Student(class_of_halves(side, 4, None)):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            gradients, loss = compute(*data)
            apply(self.optimizer, self, _means(gradients))
            return {"loss": loss.reduce_mean()}

    model = Student()

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        found = model(x, training=True)
        hard = tf.keras.losses.sparse_categorical_crossentropy(y, found, from_logits=True)
        soft = tf.keras.losses.KLDivergence(reduction=None)(
            tf.nn.softmax(teacher(x, training=False) / 3.0), tf.nn.softmax(found / 3.0)
        )
        return tf.reduce_mean(0.1 * hard + 0.9 * soft * 9.0)

    compute = computing(side, model, loss_of)
    model.compile(tf.keras.optimizers.SGD(0.1))
    x, _ = _data()
    if side.base is tf.keras.Model:
        model(x)
    y = np.arange(ROWS) % 4
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return _found(model, history)


def recipe_ema_by_optimizer(side: Side) -> Found:
    """``use_ema`` of an optimizer, in a loop of one's own."""
    model = two_halves(side)
    optimizer = tf.keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    compute, same = computing(side, model, square), []
    for number in range(3):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, _means(gradients))
        same.append(loss.reduce_mean())
    optimizer.finalize_variable_values(model.trainable_variables)
    same.append(compute(rows())[1].reduce_mean())
    return _of(model, same)


def recipe_ema_by_hand(side: Side) -> Found:
    """A shadow of the weights, as ``tf.train.ExponentialMovingAverage`` has it."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.1)
    compute, same = computing(side, model, square), []
    shadows: list[Any] = []
    for number in range(3):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, _means(gradients))
        if not shadows:
            shadows = [tf.Variable(each, trainable=False) for each in model.trainable_variables]
        for shadow, each in zip(shadows, model.trainable_variables, strict=True):
            shadow.assign_sub(0.1 * (shadow - each))
        same.append(loss.reduce_mean())
    return Found(same, by_name(model.trainable_variables, shadows))


def recipe_teacher_by_average(side: Side) -> Found:
    """Mean teacher: a second distributed model follows the first one."""
    model, teacher = two_halves(side), two_halves(side)
    optimizer, same = tf.keras.optimizers.SGD(0.1), []
    start = side.step(lambda x: (model(x), teacher(x)))
    start(rows())
    teacher.set_weights(model.get_weights())

    @side.step
    def compute(x: Any, y: Any) -> Any:
        aim = tf.stop_gradient(teacher(y, training=False))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - aim - 0.1) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    for number in range(3):
        gradients, loss = compute(rows(number), rows(number + 4))
        apply(optimizer, model, _means(gradients))
        for one, other in zip(teacher.variables, model.variables, strict=True):
            one.assign(0.9 * one + 0.1 * other)
        same.append(loss.reduce_mean())
    return _of(teacher, same)


def recipe_accumulation(side: Side) -> Found:
    """``gradient_accumulation_steps`` of an optimizer, in ``fit``."""
    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    return _found(model, model.fit(*_data(), batch_size=8, epochs=2, shuffle=False, verbose=0))


def recipe_scaled_losses(side: Side) -> Found:
    """A ``LossScaleOptimizer`` in a loop of one's own."""
    model = two_halves(side)
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    side.step(lambda x: model(x))(rows())
    optimizer.build(model.trainable_variables)
    same = []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = square(model, x)
            scaled = optimizer.scale_loss(loss)
        return tape.gradient(scaled, model.trainable_variables), loss

    for number in range(3):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, _means(gradients))
        same.append(loss.reduce_mean())
    return _of(model, same)


def recipe_half_precision(side: Side) -> Found:
    """``mixed_bfloat16`` in ``fit``; numbers are those of halves."""
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = two_halves(side, 1)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        x, y = _data()
        history = model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
        assert np.isfinite(history.history["loss"][0])
        return Found([np.float32(len(model.weights))], {})
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def recipe_schedule(side: Side) -> Found:
    """A cosine schedule with warm-up, and decayed weights without biases."""
    schedule = tf.keras.optimizers.schedules.CosineDecay(
        0.0, 10, warmup_target=0.05, warmup_steps=3
    )
    optimizer = tf.keras.optimizers.AdamW(schedule, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = two_halves(side, 1)
    model.compile(optimizer, "mse")
    return _found(model, model.fit(*_data(), batch_size=8, epochs=2, shuffle=False, verbose=0))


def recipe_plateau(side: Side) -> Found:
    """``ReduceLROnPlateau``, ``LearningRateScheduler``, ``TerminateOnNaN``, with validation."""
    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    callbacks = [
        tf.keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=1.0),
        tf.keras.callbacks.TerminateOnNaN(),
    ]
    x, y = _data()
    options = {"validation_data": (x[:16], y[:16]), "callbacks": callbacks, "epochs": 4}
    return _found(model, model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options))


def recipe_scheduler(side: Side) -> Found:
    """A rate by the number of the epoch, and a callback that looks at weights."""
    seen: list[Any] = []

    class Watching(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            every = self.model.get_weights()
            seen.append(np.float32(sum(np.sum(np.abs(each)) for each in every)))

    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    callbacks = [
        tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        Watching(),
    ]
    options = {"callbacks": callbacks, "epochs": 3, "batch_size": 8}
    found = _found(model, model.fit(*_data(), shuffle=False, verbose=0, **options))
    return found._replace(same=[*found.same, *seen])


def recipe_masked_attention(side: Side) -> Found:
    """Tokens with padding, attention that uses the mask, a pooled head."""
    inputs = tf.keras.Input((6,), dtype="int32")
    x = L.Embedding(9, WIDTH, mask_zero=True, name="table")(inputs)
    x = x + L.MultiHeadAttention(2, 2, name="attention")(x, x)
    outputs = L.Dense(1, name="head")(L.GlobalAveragePooling1D()(x))
    model = given(side, tf.keras.Model(inputs, outputs))
    model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    x = np.random.RandomState(1).randint(1, 9, (ROWS, 6))
    x[:, 4:] = 0
    y = _data()[1]
    return _found(model, model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))


def recipe_several_ends(side: Side) -> Found:
    """Numbers and tokens in, two losses out, in a loop with metrics of Keras."""
    a, b = tf.keras.Input((WIDTH,), name="a"), tf.keras.Input((3,), dtype="int32", name="b")
    of_b = L.Flatten()(L.Embedding(5, 4, name="table")(b))
    x = L.Dense(WIDTH, "tanh", name="both")(L.Concatenate()([a, of_b]))
    ends = {"kind": L.Dense(3, name="kind")(x), "size": L.Dense(1, name="size")(x)}
    model = given(side, tf.keras.Model({"a": a, "b": b}, ends))
    accuracy, error = (
        tf.keras.metrics.SparseCategoricalAccuracy(),
        tf.keras.metrics.MeanAbsoluteError(),
    )

    @side.step
    def compute(a: Any, b: Any, kind: Any, size: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model({"a": a, "b": b}, training=True)
            loss = tf.reduce_mean(
                tf.keras.losses.sparse_categorical_crossentropy(
                    kind, found["kind"], from_logits=True
                )
            ) + 0.5 * tf.reduce_mean((found["size"] - size) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss, found

    optimizer, same = tf.keras.optimizers.Adam(0.01), []
    for number in range(2):
        kind, size = tokens(3), numbers(1)
        gradients, loss, found = compute(rows(number), tokens(5, 3), kind, size)
        apply(optimizer, model, _means(gradients))
        accuracy.update_state(kind, found["kind"].merge())
        error.update_state(size, found["size"].merge())
        same += [loss.reduce_mean(), accuracy.result(), error.result()]
    return _of(model, same)


def recipe_counting_layer(side: Side) -> Found:
    """A layer that counts its calls and keeps a moving mean, read after training."""

    class Moving(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(
                name="mean", shape=(shape[-1],), initializer="zeros", trainable=False
            )

        def call(self, x: Any, training: Any = None) -> Any:
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
            return x - self.mean

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.moving(model.first(x), training=training)
        with side.part(1):
            return model.second(x)

    model = model_of(
        side,
        call,
        first=dense("first"),
        moving=lambda: Moving(name="moving"),
        second=dense("second"),
    )
    compute, optimizer, same = computing(side, model, square), tf.keras.optimizers.SGD(0.1), []
    for number in range(3):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, _means(gradients))
        same.append(loss.reduce_mean())
    return Found(same, by_name(model.variables, model.variables))


def recipe_centers(side: Side) -> Found:
    """Center loss: centers in a variable of the script, moved outside of the step."""
    model, centers = two_halves(side, 4, None), tf.Variable(tf.zeros([3, 4]), trainable=False)
    optimizer, same = tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = tf.reduce_mean((found - tf.gather(centers, y)) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss, found

    for number in range(3):
        y = tokens(3)
        gradients, loss, found = compute(rows(number), y)
        apply(optimizer, model, _means(gradients))
        centers.scatter_nd_add(y[:, tf.newaxis], 0.1 * found.merge())
        same += [loss.reduce_mean(), centers + 0.0]
    return _of(model, same)


def recipe_learned_weights(side: Side) -> Found:
    """Two losses weighed by variables of the script, trained outside of the model."""
    model, logs = two_halves(side), tf.Variable([0.0, 0.0], name="logs")
    optimizer, other, same = tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.SGD(0.05), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = model(x, training=True)
            parts = tf.stack([tf.reduce_mean((y - 0.3) ** 2), tf.reduce_mean(tf.abs(y))])
            loss = tf.reduce_sum(tf.exp(-logs) * parts + logs)
        return tape.gradient(loss, model.trainable_variables), tape.gradient(loss, logs), loss

    for number in range(3):
        gradients, of_logs, loss = compute(rows(number))
        apply(optimizer, model, _means(gradients))
        other.apply_gradients([(of_logs.accumulate(), logs)])
        same += [loss.reduce_mean(), logs + 0.0]
    return _of(model, same)


def recipe_learned_weights_at_once(side: Side) -> Found:
    """The same, with one optimizer and one list of variables."""
    model, log = two_halves(side), tf.Variable(0.0, name="log")
    optimizer, same = tf.keras.optimizers.Adam(0.05), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.exp(-log) * tf.reduce_mean((y - 0.3) ** 2) + log
        return tape.gradient(loss, [*model.trainable_variables, log]), loss

    for number in range(3):
        gradients, loss = compute(rows(number))
        pairs = zip(_means(gradients), [*model.trainable_variables, log], strict=True)
        optimizer.apply_gradients(pairs)
        same += [loss.reduce_mean(), log + 0.0]
    return _of(model, same)


def recipe_clipped(side: Side) -> Found:
    """Each gradient clipped by its norm, the norm of all told in a log."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.1)
    compute, same = computing(side, model, square), []
    for number in range(3):
        gradients, loss = compute(rows(number))
        means = [tf.clip_by_norm(each, 0.05) for each in _means(gradients)]
        same += [loss.reduce_mean(), np.float32(tf.linalg.global_norm(means).numpy())]
        apply(optimizer, model, means)
    return _of(model, same)


def recipe_noised(side: Side) -> Found:
    """Gradients centered, scaled by the largest of all, with decay by hand."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.1)
    compute, same = computing(side, model, square), []
    for number in range(3):
        gradients, loss = compute(rows(number))
        means = [each - tf.reduce_mean(each) for each in _means(gradients)]
        most = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(each)) for each in means]))
        apply(optimizer, model, [each / most for each in means])
        for each in model.trainable_variables:
            each.assign_sub(0.01 * each)
        same += [loss.reduce_mean(), most]
    return _of(model, same)


def recipe_lookahead(side: Side) -> Found:
    """Slow weights in plain arrays, put back each second step."""
    model, optimizer = two_halves(side), tf.keras.optimizers.Adam(0.05)
    compute, same = computing(side, model, square), []
    compute(rows())
    slow = model.get_weights()
    for number in range(4):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, _means(gradients))
        if number % 2:
            fast = model.get_weights()
            slow = [a + 0.5 * (b - a) for a, b in zip(slow, fast, strict=True)]
            model.set_weights(slow)
        same.append(loss.reduce_mean())
    return _of(model, same)


def recipe_sam(side: Side) -> Found:
    """Sharpness-aware: a step up along the gradients, gradients there, back and down."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.1)
    compute, same = computing(side, model, square), []
    for number in range(2):
        gradients, loss = compute(rows(number))
        means = _means(gradients)
        norm = tf.linalg.global_norm(means)
        moves = [0.05 * each / (norm + 1e-12) for each in means]
        for each, move in zip(model.trainable_variables, moves, strict=True):
            each.assign_add(move)
        gradients, _ = compute(rows(number))
        for each, move in zip(model.trainable_variables, moves, strict=True):
            each.assign_sub(move)
        apply(optimizer, model, _means(gradients))
        same.append(loss.reduce_mean())
    return _of(model, same)


def recipe_in_a_function(side: Side) -> Found:
    """The whole update in one ``tf.function``, with metrics that are reset."""
    model, optimizer = two_halves(side), tf.keras.optimizers.Adam(0.05)
    compute, mean, same = computing(side, model, square), tf.keras.metrics.Mean(), []

    def update(x: Any) -> Any:
        gradients, loss = compute(x)
        means = _means(gradients)
        means, norm = tf.clip_by_global_norm(means, 0.1)
        apply(optimizer, model, means)
        mean.update_state(loss.reduce_mean())
        return norm

    if side.base is not tf.keras.Model:
        update = tf.function(update)
    for number in range(4):
        norm = update(rows(number))
        if number % 2:
            same += [mean.result(), norm]
            mean.reset_state()
    return _of(model, same)


def recipe_evaluated(side: Side) -> Found:
    """``evaluate`` and ``predict`` on batches, and the model's own metrics."""
    model = two_halves(side, 1, "sigmoid")
    model.compile("sgd", "binary_crossentropy", metrics=[tf.keras.metrics.AUC(), "accuracy"])
    x, y = _data()
    same = []
    for begin in (0, 16):
        same.append(model.train_on_batch(x[begin : begin + 16], y[begin : begin + 16]))
    same += [model.test_on_batch(x, y), model.predict_on_batch(x), model.predict(x, verbose=0)]
    same.append(model.evaluate(x, y, batch_size=8, verbose=0))
    return _of(model, [np.array(each, np.float32) for each in tf.nest.flatten(same)])


def recipe_weights_in_files(side: Side) -> Found:
    """The best weights are written, by a loss of validation."""
    model = two_halves(side, 1)
    model.compile("sgd", "mse")
    x, y = _data()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "best.weights.h5"))
        best = tf.keras.callbacks.ModelCheckpoint(
            path, "val_loss", save_best_only=True, save_weights_only=True
        )
        options = {"validation_data": (x[:16], y[:16]), "callbacks": [best], "verbose": 0}
        history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, **options)
    return _found(model, history)


def recipe_whole_models_in_files(side: Side) -> Found:
    """Whole models written after each epoch."""
    model = two_halves(side, 1)
    model.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [tf.keras.callbacks.ModelCheckpoint(str(Path(folder, "{epoch}.keras")))]
        options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        return _found(model, model.fit(*_data(), epochs=2, **options))


def recipe_class_weights(side: Side) -> Found:
    """``class_weight`` in ``fit``, with metrics that are weighted."""
    model = two_halves(side, 1, "sigmoid")
    model.compile("sgd", "binary_crossentropy", weighted_metrics=["accuracy"])
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
    return _found(model, model.fit(*_data(), class_weight={0: 1.0, 1: 3.0}, **options))


def recipe_layers_frozen(side: Side) -> Found:
    """Transfer: the first layer stands still, then trains at a smaller rate."""
    model, same = two_halves(side), []
    side.step(lambda x: model(x))(rows())
    model.first.trainable = False
    for rate in (0.1, 0.01):
        compute, optimizer = computing(side, model, square), tf.keras.optimizers.SGD(rate)
        for number in range(2):
            gradients, loss = compute(rows(number))
            pairs = zip(_means(gradients), model.trainable_variables, strict=True)
            optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
            same.append(loss.reduce_mean())
        model.first.trainable = True
    return _of(model, same)


def recipe_tape_penalty(side: Side) -> Found:
    """Gradients of the inputs are penalized, as in WGAN-GP."""
    critic = _halves(side, "judge", 1)
    optimizer, same = tf.keras.optimizers.SGD(0.05), []

    @side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            middle = 0.5 * (x + y)
            with tf.GradientTape() as inner:
                inner.watch(middle)
                score = critic(middle, training=True)
            slope = tf.norm(inner.gradient(score, middle), axis=-1)
            loss = tf.reduce_mean(critic(x) - critic(y)) + tf.reduce_mean((slope - 1.0) ** 2)
        return tape.gradient(loss, critic.trainable_variables), loss

    for number in range(2):
        gradients, loss = compute(rows(number), rows(number + 3))
        apply(optimizer, critic, _means(gradients))
        same.append(loss.reduce_mean())
    return _of(critic, same)


#: What gives the numbers of TensorFlow.
NAMES = tuple(name for name in list(globals()) if name.startswith("recipe_"))
