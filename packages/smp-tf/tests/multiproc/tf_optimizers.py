"""What bodies train to compare optimizers, and ways to ask for gradients, with plain TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tf_worlds import MICROBATCHES

from smdistributed.modelparallel.tensorflow.compat.keras import build_optimizer
from smdistributed.modelparallel.tensorflow.parameters.variables import is_here

STEPS = 12
HALF = 6
LAYERS = 4
NORM = 0.05
#: So large that gradients overflow in half precision, first where they are largest.
SCALE = 2.0**24


class Outcome(NamedTuple):
    """What training gave on one process.

    Attributes:
        losses: of each step.
        extra: of each step, a scale of losses, or a norm.
        finite: of each step, whether the gradients of this process are finite.
        weights: of the layers, by their numbers.
    """

    losses: list[float]
    extra: list[float]
    finite: list[bool]
    weights: dict[int, Any]


class Case(NamedTuple):
    """One way to train.

    Attributes:
        optimizer: makes it.
        gradients: returns those of a loss, given the tape, the loss, variables and optimizer.
        policy: dtype policy of the layers.
        clips: whether the training loop clips by the norm of all gradients.
    """

    optimizer: Callable[[], Any]
    gradients: Callable[[Any, Any, Any, Any], Any] | None = None
    policy: str = "float32"
    clips: bool = False


def _legacy(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(tf.keras.optimizers.legacy, name)(*args, **kwargs)


def _scaling() -> Any:
    inner = tf.keras.optimizers.SGD(0.01)
    return tf.keras.mixed_precision.LossScaleOptimizer(
        inner, initial_scale=SCALE, dynamic_growth_steps=2
    )


CASES: Mapping[str, Case] = {
    "tf_gradients": Case(
        lambda: tf.keras.optimizers.Adam(0.01),
        lambda tape, loss, ours, opt: tf.gradients(loss, ours),
    ),
    "global_clipnorm": Case(lambda: tf.keras.optimizers.SGD(0.5, global_clipnorm=NORM)),
    "clipping_by_hand": Case(lambda: tf.keras.optimizers.SGD(0.5), clips=True),
    "bfloat16": Case(lambda: tf.keras.optimizers.SGD(0.1), policy="mixed_bfloat16"),
    "overflow": Case(_scaling, policy="mixed_float16"),
}
#: Optimizers that Keras 3 no longer has.
LEGACY_CASES: Mapping[str, Case] = {
    "legacy": Case(lambda: _legacy("Adam", 0.01)),
    "legacy_clipnorm": Case(lambda: _legacy("SGD", 0.5, global_clipnorm=NORM)),
    "get_gradients": Case(
        lambda: _legacy("Adam", 0.01), lambda tape, loss, ours, opt: opt.get_gradients(loss, ours)
    ),
}
EVERY = {**CASES, **LEGACY_CASES}


def has_legacy() -> bool:
    """Tells whether Keras has its legacy optimizers; version 3 has names that refuse."""
    return not hasattr(tf.keras, "Variable")


def _model(base: Any, policy: str) -> Any:
    class Deep(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="deep")
            self.dense = [
                tf.keras.layers.Dense(8, "tanh", dtype=policy, name=f"dense_{i}")
                for i in range(LAYERS)
            ]

        def call(self, x: Any) -> Any:
            for number, layer in enumerate(self.dense):
                # The gradients of the first half are small, and overflow later.
                x = 0.05 * layer(x) if number == LAYERS // 2 - 1 else layer(x)
            return tf.cast(x, tf.float32)

    return Deep()


def _batch() -> tuple[Any, Any]:
    random = np.random.RandomState(0)
    x = random.randn(16, 8).astype(np.float32)
    return tf.constant(x), tf.constant(random.randn(16, 8).astype(np.float32))


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)


def _scaled(optimizer: Any, loss: Any) -> Any:
    if not _scales(optimizer):
        return loss
    if has_legacy():
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss)


def _unscaled(optimizer: Any, gradients: Any) -> Any:
    if _scales(optimizer) and has_legacy():
        return optimizer.get_unscaled_gradients(gradients)
    return gradients


def _scale(optimizer: Any) -> float:
    scale = optimizer.loss_scale if has_legacy() else optimizer.dynamic_scale
    return float(tf.convert_to_tensor(scale))


def _compute(
    case: Case, model: Any, optimizer: Any, x: Any, y: Any, share: float = 1.0
) -> tuple[Any, Any]:
    """Returns gradients of a loss, as a share of those of a batch, and the loss."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x)))
        if _scales(optimizer):
            # Before it is built the scale of losses is a number, which the graph would keep.
            build_optimizer(optimizer, model.trainable_variables)
        scaled = share * _scaled(optimizer, loss)
    ours = model.trainable_variables
    if case.gradients is not None:
        return case.gradients(tape, scaled, ours, optimizer), loss
    return tape.gradient(scaled, ours), loss


def _train(
    case: Case,
    model: Any,
    optimizer: Any,
    run: Callable[[], tuple[list[Any], Any]],
    clip: Callable[..., Any],
    num_steps: int = STEPS,
    at_half: Callable[[], object] = lambda: None,
) -> Outcome:
    """Trains.

    Args:
        case: how.
        model: what.
        optimizer: by what.
        run: computes gradients and loss of the batch.
        clip: as ``tf.clip_by_global_norm``.
        num_steps: how long.
        at_half: called before the second half of all steps.
    """
    losses, extra, finite = [], [], []
    for number in range(num_steps):
        if number == HALF:
            at_half()
        gradients, loss = run()
        flags = [bool(np.isfinite(each).all()) for each in gradients]
        pairs = zip(flags, model.trainable_variables, strict=True)
        finite.append(all(flag for flag, variable in pairs if is_here(variable)))
        gradients = _unscaled(optimizer, gradients)
        if case.clips:
            gradients, norm = clip(gradients, NORM)
            extra.append(float(norm))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
        if case.policy == "mixed_float16":
            extra.append(_scale(optimizer))
    weights = {
        number: [tf.convert_to_tensor(v).numpy() for v in layer.variables]
        for number, layer in enumerate(model.dense)
        if any(v is own for v in layer.variables for own in model.trainable_variables)
    }
    return Outcome(losses, extra, finite, weights)


def train_plainly(name: str) -> Outcome:
    """Trains with TensorFlow alone, on the same microbatches."""
    case = EVERY[name]
    model, optimizer = _model(tf.keras.Model, case.policy), case.optimizer()
    x, y = _batch()
    model(x)
    compute = tf.function(lambda a, b: _compute(case, model, optimizer, a, b, 1 / MICROBATCHES))

    def run() -> Any:
        parts = zip(tf.split(x, MICROBATCHES), tf.split(y, MICROBATCHES), strict=True)
        results = [compute(*part) for part in parts]
        gradients = [
            tf.add_n(group) for group in zip(*(gradients for gradients, _ in results), strict=True)
        ]
        return gradients, tf.add_n([loss for _, loss in results]) / MICROBATCHES

    return _train(case, model, optimizer, run, tf.clip_by_global_norm)


def train_distributed(name: str, folder: str, resumes: bool = False) -> Outcome:
    """Trains over two partitions, and saves half-way; to be called on every rank.

    Args:
        name: of the case.
        folder: for its checkpoint.
        resumes: trains the second half only, from that checkpoint.
    """
    import smdistributed.modelparallel.tensorflow as smp

    case = EVERY[name]
    model, optimizer = _model(smp.DistributedModel, case.policy), case.optimizer()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = smp.CheckpointManager(checkpoint, folder)
    x, y = _batch()

    @smp.step
    def compute(a: Any, b: Any) -> Any:
        return _compute(case, model, optimizer, a, b)

    def run() -> Any:
        gradients, loss = compute(x, y)
        return [each.accumulate() for each in gradients], loss.reduce_mean()

    if resumes:
        assert manager.restore()
        return _train(case, model, optimizer, run, smp.clip_by_global_norm, STEPS - HALF)
    return _train(case, model, optimizer, run, smp.clip_by_global_norm, at_half=manager.save)


def fit(distributed: bool) -> list[float]:
    """Trains a model in half precision by ``fit``; returns the losses."""
    base = tf.keras.Model
    if distributed:
        import smdistributed.modelparallel.tensorflow as smp

        base = smp.DistributedModel
    model = _model(base, "mixed_float16")
    model.compile(optimizer=_scaling(), loss="mse")
    x, y = _batch()
    history = model.fit(x, y, epochs=STEPS, batch_size=8, shuffle=False, verbose=0)
    return [float(loss) for loss in history.history["loss"]]
