"""What is used of Keras's models and optimizers beyond its public API, for versions 2 and 3."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import autograph
from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

#: Whether Keras is version 3, whose variables wrap TensorFlow's.
IS_KERAS_3 = hasattr(tf.keras, "Variable")


def _root(value: Any) -> str:
    """Returns the name of the package that a class or a function is from."""
    return str(value.__module__).split(".", maxsplit=1)[0]


def private(name: str) -> Any:
    """Returns a module of the Keras that TensorFlow uses: keras, or tf_keras if asked for."""
    return importlib.import_module(f"{_root(tf.keras.Model)}.src.{name}")


if not IS_KERAS_3:
    autocast_variable = private("mixed_precision.autocast_variable")

Variable = Any


# Models


def variable_of(variable: Variable) -> Variable:
    """Returns TensorFlow's variable, also of one that Keras wrapped."""
    if IS_KERAS_3:
        return variable.value if isinstance(variable, tf.keras.Variable) else variable
    while isinstance(variable, autocast_variable.AutoCastVariable):
        variable = variable._variable
    return variable


def variables_made(model: Any) -> list[Variable]:
    """Returns TensorFlow's variables that a model and its layers have so far.

    Keras 2 refuses to say before each ``Sequential`` in it was called.
    """
    if IS_KERAS_3:
        return [variable_of(each) for each in model.variables]
    return [
        variable_of(variable)
        for layer in model._flatten_layers()
        for variable in (*layer._trainable_weights, *layer._non_trainable_weights)
        if is_variable(variable)
    ]


def automatic_names(model: Any) -> set[str]:
    """Returns what Keras calls the layers of a model that have no names, without numbers."""
    to_name = private(f"utils.{'naming' if IS_KERAS_3 else 'generic_utils'}").to_snake_case
    found = {str(to_name(type(layer).__name__)) for layer in model._flatten_layers()}
    return found | {f"distributed_{name}" for name in found}


def variables_of_metrics(model: Any) -> list[Variable]:
    """Returns TensorFlow's variables of metrics that are attributes of a model or its layers.

    Those are layers of it with Keras 2 alone.
    """
    if IS_KERAS_3:
        return []
    return [
        variable_of(variable)
        for layer in model._flatten_layers()
        for metric in layer._metrics
        for variable in metric.variables
    ]


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras carries beside a tensor, for layers and losses; or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Puts a mask beside a tensor, where ``mask_of`` and Keras find it."""
    tensor._keras_mask = mask


def is_variable(value: Any) -> bool:
    """Tells whether a value is a variable, TensorFlow's or one that Keras wrapped."""
    return isinstance(value, tf.Variable) or (IS_KERAS_3 and isinstance(value, tf.keras.Variable))


def path_of(variable: Variable) -> str:
    """Returns the name of a variable with those of the layers around it, as far as Keras has it."""
    return str(getattr(variable, "path", None) or variable.name).split(":", maxsplit=1)[0]


def note_loss(model: Any, loss: Any, count: Any) -> None:
    """Adds a batch's loss to the metric ``loss`` of a model.

    Args:
        model: that was compiled.
        loss: mean over the batch.
        count: number of examples in the batch.
    """
    if IS_KERAS_3:
        model._loss_tracker.update_state(loss, sample_weight=count)
    elif not _has_own_loss(model):
        model.compiled_loss._total_loss_mean.update_state(loss, sample_weight=count)


def _has_own_loss(model: Any) -> bool:
    """Tells whether a model computes its loss in its own way, of which Keras 2 notes a part."""
    return type(model).compute_loss is not tf.keras.Model.compute_loss


class _Unnoted:
    """A metric that takes no notice."""

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""


@contextlib.contextmanager
def losses_unnoted(model: Any) -> Iterator[None]:
    """Within, ``compute_loss`` does not add to the metric ``loss``, which Keras 2 does there."""
    if IS_KERAS_3 or _has_own_loss(model):
        yield
        return
    losses = model.compiled_loss
    saved, losses._total_loss_mean = losses._total_loss_mean, _Unnoted()
    try:
        yield
    finally:
        losses._total_loss_mean = saved


def losses_of(model: Any) -> list[Any]:
    """Returns the objects that compute the losses of a compiled model; known after the first one.

    Empty where a model computes losses in a way of its own.
    """
    if _has_own_loss(model):
        return []
    if IS_KERAS_3:
        compiled = model._compile_loss
        found = [] if compiled is None else [each.loss for each in compiled._flat_losses or ()]
    else:
        found = [each for each in tf.nest.flatten(model.compiled_loss._losses) if each is not None]
    return found


def is_mean(loss: Any) -> bool:
    """Tells whether a loss is one of Keras's own, the mean of what a mask leaves.

    Others may be a number for all examples, which a mask does not change.
    """
    if not isinstance(loss, tf.keras.losses.Loss) or not _is_mean(loss):
        return False
    return {_root(type(loss)), _root(getattr(loss, "fn", type(loss)))} == {_root(tf.keras.Model)}


def sums(loss: Any) -> bool:
    """Tells whether a loss of Keras says of itself that it is no mean over the examples."""
    return isinstance(loss, tf.keras.losses.Loss) and not _is_mean(loss)


def _is_mean(loss: Any) -> bool:
    return getattr(loss, "reduction", "auto") in ("auto", "mean", "sum_over_batch_size")


def thread_states() -> list[Any]:
    """Returns what Keras keeps of a thread: settings, counters of names, the source of seeds."""
    if not IS_KERAS_3:
        return [private("backend")._SEED_GENERATOR]
    state = private("backend.common.global_state")
    return [state.GLOBAL_STATE_TRACKER, state.GLOBAL_SETTINGS_TRACKER]


def calls_of_layers(
    called: Callable[[Any, Callable[[], Any]], Any],
) -> AbstractContextManager[None]:
    """Within, every call of a layer goes through a function.

    Args:
        called: takes the layer, and what calls it; returns the result.
    """

    def make(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return called(self, lambda: original(self, *args, **kwargs))

        return autograph.not_converted(call)

    return replaced([Replacement(tf.keras.layers.Layer, "__call__", make)])


#: What Keras's training loop has, by which names of Keras 2 are told from those of a layer.
_OF_TRAINING = ("compile", "compute", "evaluate", "fit", "loss", "metrics", "predict", "step")


def own_training(model: Any) -> list[str]:
    """Returns what of Keras's training loop a model, or its class, has in its own way."""
    if IS_KERAS_3:
        trainer = private("trainers.trainer").Trainer
        parts = (trainer, private("backend.tensorflow.trainer").TensorFlowTrainer)
        names = {name for part in parts for name in vars(part)}
    else:
        every = vars(tf.keras.Model)
        names = {name for name in every if any(word in name for word in _OF_TRAINING)}
    owners = [*(kind for kind in type(model).__mro__ if not _is_keras(kind))]
    own = {name for kind in owners for name in vars(kind)}
    own |= {name for name, value in vars(model).items() if callable(value) and name in names}
    return sorted(name for name in names & own if not name.startswith("__"))


def _is_keras(kind: type) -> bool:
    return kind is object or _root(kind) in (_root(tf.keras.Model), "tensorflow", "keras")


def is_of_keras(callback: Any) -> bool:
    """Tells whether Keras has a part in what a callback does, its base class left out."""
    plain = (tf.keras.callbacks.Callback, object)
    return any(_is_keras(kind) for kind in type(callback).__mro__ if kind not in plain)


@contextlib.contextmanager
def compiled_like(model: Any, other: Any, optimizer: Any) -> Iterator[None]:
    """Within, a model is written as if it had been compiled like another one.

    Args:
        model: of Keras 3.
        other: that was compiled.
        optimizer: which is written with its state.
    """
    known = other._compile_config
    # A copy: to write an .h5 file Keras takes the optimizer out of it.
    config = type(known)(**{**known.config, "jit_compile": "auto"})
    own = {
        "optimizer": optimizer,
        "compiled": True,
        "_compile_config": config,
        "get_compile_config": config.serialize,
    }
    saved = {name: vars(model)[name] for name in own if name in vars(model)}
    vars(model).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(model)[name]
        vars(model).update(saved)


def signature_of_call(model: Any) -> inspect.Signature | None:
    """Returns what a model's own ``call`` takes; None if it is one of Keras's."""
    if any("call" in vars(kind) for kind in type(model).__mro__ if not _is_keras(kind)):
        return inspect.signature(model.call)
    return None


def takes_training(model: Any) -> bool:
    """Tells whether the ``call`` of a Keras model has a parameter ``training``."""
    return "training" in inspect.signature(model.call).parameters


# Optimizers


def optimizer_kinds(name: str) -> list[Any]:
    """Returns the classes of optimizers with this name: the present one, and the legacy one."""
    kinds = [getattr(tf.keras.optimizers, name)]
    # With Keras 3 the legacy names are there and refuse to be used.
    return kinds if IS_KERAS_3 else [*kinds, getattr(tf.keras.optimizers.legacy, name)]


def optimizer_bases() -> list[Any]:
    """Returns the classes that have an ``apply_gradients`` of their own."""
    if IS_KERAS_3:
        return [private("optimizers.base_optimizer").BaseOptimizer]
    scaling = private("mixed_precision.loss_scale_optimizer")
    return [
        private("optimizers.optimizer").Optimizer,
        private("optimizers.legacy.optimizer_v2").OptimizerV2,
        scaling.LossScaleOptimizer,
        scaling.LossScaleOptimizerV3,
    ]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Returns all variables of an optimizer of Keras, those of the scale of losses among them."""
    variables = optimizer.variables
    found = list(variables() if callable(variables) else variables)
    if not IS_KERAS_3 and scales(optimizer) and optimizer.dynamic:
        state = optimizer._loss_scale
        found += [state.current_loss_scale, state.counter]
    return found


def optimizer_slots(optimizer: Any) -> dict[str, dict[Any, Any]]:
    """Returns what an optimizer keeps of each variable that it trains.

    Keras keeps lists beside the one of the variables that it was built for; its legacy optimizers
    keep them by name.

    Returns:
        by name of the slot, and by ``slot_key`` of the trained variable.
    """
    optimizer = _keeper(optimizer)
    found: dict[str, dict[Any, Any]] = {}
    if hasattr(optimizer, "get_slot_names"):
        for key, slots in optimizer._slots.items():
            for name, variable in slots.items():
                found.setdefault(name, {})[key] = variable
        return found
    positions = getattr(
        optimizer, "_trainable_variables_indices" if IS_KERAS_3 else "_index_dict", {}
    )
    for name, value in sorted(vars(optimizer).items()):
        is_list = isinstance(value, (list, tuple)) and len(value) == len(positions) > 0
        if is_list and name not in ("_trainable_variables", "_variables"):
            slots = {key: value[place] for key, place in positions.items()}
            if all(hasattr(variable, "assign") for variable in slots.values()):
                found[name] = slots
    return found


def slot_key(optimizer: Any, variable: Any) -> Any:
    """Returns what an optimizer knows a trained variable by."""
    optimizer = _keeper(optimizer)
    if hasattr(optimizer, "get_slot_names"):
        return variable_of(variable)._unique_id
    return optimizer._var_key(variable)


def _keeper(optimizer: Any) -> Any:
    """Returns what keeps state of each trained variable: the optimizer, or one that it wraps."""
    return optimizer.inner_optimizer if scales(optimizer) else optimizer


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes the variables that an optimizer keeps for these."""
    with tf.init_scope():
        if hasattr(optimizer, "_create_all_weights"):
            optimizer._create_all_weights(variables)
        elif not getattr(optimizer, "built", False) and not getattr(optimizer, "_built", False):
            optimizer.build(variables)


def scaled(optimizer: Any, loss: Any, variables: Sequence[Any]) -> Any:
    """Returns a loss as an optimizer that scales losses wants it differentiated.

    Args:
        optimizer: of Keras.
        loss: a scalar.
        variables: that the optimizer will train; it is made ready for them.
    """
    if not IS_KERAS_3:
        return optimizer.get_scaled_loss(loss) if scales(optimizer) else loss
    if scales(optimizer):
        # Before it is built it would put its first scale into the graph, for good.
        build_optimizer(optimizer, variables)
    return optimizer.scale_loss(loss)


def unscaled(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Returns gradients of a ``scaled`` loss as ``apply_gradients`` wants them."""
    if not IS_KERAS_3 and scales(optimizer):
        return list(optimizer.get_unscaled_gradients(gradients))
    return gradients  # Keras 3 unscales them there


def scales(optimizer: Any) -> bool:
    """Tells whether an optimizer scales losses for another one that it wraps."""
    return isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
