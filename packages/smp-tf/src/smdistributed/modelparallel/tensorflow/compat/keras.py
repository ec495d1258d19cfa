"""Everything that is used of Keras beyond its public API, in one place, for versions 2 and 3."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf

#: Whether Keras is version 3, whose variables wrap TensorFlow's.
IS_KERAS_3 = hasattr(tf.keras, "Variable")


def _private(name: str) -> Any:
    """Returns a module of the Keras that TensorFlow uses: keras, or tf_keras if asked for."""
    root = tf.keras.Model.__module__.split(".", maxsplit=1)[0]
    return importlib.import_module(f"{root}.src.{name}")


if IS_KERAS_3:
    base_optimizer = _private("optimizers.base_optimizer")
    loss_scale_optimizer = _private("optimizers.loss_scale_optimizer")
else:
    autocast_variable = _private("mixed_precision.autocast_variable")
    loss_scale_optimizer = _private("mixed_precision.loss_scale_optimizer")
    base_optimizer = _private("optimizers.optimizer")
    optimizer_utils = _private("optimizers.utils")

Gradients = Sequence[Any]
Variable = Any


# Models


def variable_of(variable: Variable) -> Variable:
    """Returns TensorFlow's variable, also of one that Keras wrapped."""
    if IS_KERAS_3:
        return variable.value if isinstance(variable, tf.keras.Variable) else variable
    while isinstance(variable, autocast_variable.AutoCastVariable):
        variable = variable._variable
    return variable


def is_variable(value: Any) -> bool:
    """Tells whether a value is a variable, TensorFlow's or one that Keras wrapped."""
    return isinstance(value, tf.Variable) or (IS_KERAS_3 and isinstance(value, tf.keras.Variable))


def path_of(variable: Variable) -> str:
    """Returns the name of a variable with those of the layers around it, as far as Keras has it."""
    return str(getattr(variable, "path", None) or variable.name).split(":", maxsplit=1)[0]


def note_loss(model: Any, loss: Any, count: Any) -> None:
    """Adds a batch's loss to the metric ``loss`` of a Keras 3 model; Keras 2 notes it by itself.

    Args:
        model: that was compiled.
        loss: mean over the batch.
        count: number of examples in the batch.
    """
    if IS_KERAS_3:
        model._loss_tracker.update_state(loss, sample_weight=count)


def thread_states() -> list[Any]:
    """Returns what Keras keeps of a thread: settings, counters of names, the source of seeds."""
    if not IS_KERAS_3:
        return [_private("backend")._SEED_GENERATOR]
    state = _private("backend.common.global_state")
    return [state.GLOBAL_STATE_TRACKER, state.GLOBAL_SETTINGS_TRACKER]


def takes_training(model: Any) -> bool:
    """Tells whether the ``call`` of a Keras model has a parameter ``training``."""
    return "training" in inspect.signature(model.call).parameters


# Optimizers


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Returns all variables of an optimizer of Keras."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def optimizer_slots(optimizer: Any) -> dict[str, dict[Any, Any]]:
    """Returns what an optimizer keeps of each variable that it trains.

    Keras keeps lists beside the one of the variables that it was built for; its legacy optimizers
    keep them by name.

    Returns:
        by name of the slot, and by ``slot_key`` of the trained variable.
    """
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
        if is_list and name not in ("_trainable_variables", "_variables", "_smp_trained"):
            slots = {key: value[place] for key, place in positions.items()}
            if all(hasattr(variable, "assign") for variable in slots.values()):
                found[name] = slots
    return found


def slot_key(optimizer: Any, variable: Any) -> Any:
    """Returns what an optimizer knows a trained variable by."""
    if hasattr(optimizer, "get_slot_names"):
        return variable_of(variable)._unique_id
    return optimizer._var_key(variable)


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
        return optimizer.get_scaled_loss(loss) if _scales(optimizer) else loss
    if _scales(optimizer):
        # Before it is built it would put its first scale into the graph, for good.
        build_optimizer(optimizer, variables)
    return optimizer.scale_loss(loss)


def unscaled(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Returns gradients of a ``scaled`` loss as ``apply_gradients`` wants them."""
    if not IS_KERAS_3 and _scales(optimizer):
        return list(optimizer.get_unscaled_gradients(gradients))
    return gradients  # Keras 3 unscales them there


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)


@contextlib.contextmanager
def whole_model(
    clip: Callable[[Gradients, Any, Sequence[Any]], Gradients],
    is_finite: Callable[[Any], Any],
) -> Iterator[None]:
    """Within, optimizers decide by the gradients of all processes.

    Args:
        clip: takes gradients, a norm and the variables; returns the gradients, scaled so that they
            have at most this norm together with those of the other processes; or as they are.
        is_finite: takes whether the gradients of this process are finite, a tensor; returns whether
            those of all are.
    """
    with contextlib.ExitStack() as replaced:

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            replaced.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

        def clipping(original: Any) -> Any:
            def clip_gradients(self: Any, gradients: Gradients) -> Gradients:
                if self.global_clipnorm and not self.clipnorm:
                    return clip(gradients, self.global_clipnorm, _trained(self))
                result: Gradients = original(self, gradients)
                return result

            return clip_gradients

        replace(
            base_optimizer.BaseOptimizer if IS_KERAS_3 else base_optimizer.Optimizer,
            "_clip_gradients",
            clipping,
        )
        replace(
            base_optimizer.BaseOptimizer if IS_KERAS_3 else base_optimizer.Optimizer,
            "add_variable_from_reference",
            _noting_slots,
        )
        if IS_KERAS_3:
            replace(
                loss_scale_optimizer.LossScaleOptimizer,
                "check_finite",
                lambda original: lambda self, gradients: is_finite(original(self, gradients)),
            )
        else:
            replace(base_optimizer.Optimizer, "apply_gradients", _noting_variables)
            replace(optimizer_utils, "make_global_gradient_clipnorm_fn", lambda _: _legacy(clip))
            replace(
                loss_scale_optimizer,
                "_is_all_finite",
                lambda original: lambda gradients: is_finite(original(gradients)),
            )
        yield


def _noting_slots(original: Any) -> Any:
    """Returns what makes an optimizer's variables such that each knows the one that it is about."""
    place = inspect.signature(original)

    def add_variable_from_reference(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = original(self, *args, **kwargs)
        _, reference, *_ = place.bind(self, *args, **kwargs).arguments.values()
        variable_of(slot)._smp_slot_of = variable_of(reference)
        return slot

    return add_variable_from_reference


def _noting_variables(original: Any) -> Any:
    """Returns ``apply_gradients`` of Keras 2 such that ``_trained`` knows its variables."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        self._smp_trained = tuple(variable for _, variable in pairs)
        return original(self, pairs, *args, **kwargs)

    return apply_gradients


def _trained(optimizer: Any) -> Sequence[Any]:
    variables: Sequence[Any] = (
        optimizer._trainable_variables if IS_KERAS_3 else optimizer._smp_trained
    )
    return variables


def _legacy(clip: Callable[[Gradients, Any, Sequence[Any]], Gradients]) -> Any:
    """Returns what Keras's legacy optimizers make their clipping function with."""

    def make(norm: Any) -> Any:
        def clip_pairs(pairs: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(clip(gradients, norm, variables), variables, strict=True))

        return (lambda pairs: pairs) if norm is None else clip_pairs

    return make
