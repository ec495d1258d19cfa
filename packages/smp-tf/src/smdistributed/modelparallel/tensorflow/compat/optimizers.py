"""Where Keras's optimizers decide something that one process cannot know alone.

While the library runs, the functions that decide it stand replaced, in the whole process: an
optimizer is the user's, and may have been made in any way. ``whole_model`` lists them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat.keras import (
    IS_KERAS_3,
    build_optimizer,
    optimizer_bases,
    private,
    scales,
    variable_of,
)
from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

Gradients = Sequence[Any]
#: Takes gradients, a norm and the variables; returns the gradients.
Clip = Callable[[Gradients, Any, Sequence[Any]], Gradients]
#: Takes whether the gradients of this process are finite, a tensor; returns whether those of all.
IsFinite = Callable[[Any], Any]
#: Takes variables of which none has a gradient in this process; tells whether others may have some.
HasOthers = Callable[[Sequence[Any]], bool]


def whole_model(
    clip: Clip, is_finite: IsFinite, has_others: HasOthers
) -> AbstractContextManager[None]:
    """Within, optimizers decide by the gradients of all processes.

    One that gets no gradient in this process counts the update, where Keras raises.

    Args:
        clip: scales gradients so that they have at most a norm together with those of the other
            processes; or returns them as they are.
        is_finite: tells whether all processes have finite gradients.
        has_others: tells whether other processes may have gradients where this one has none.
    """
    kind = _keras_3 if IS_KERAS_3 else _keras_2
    return replaced([*kind(clip, is_finite), *_skipping(clip, has_others)])


def _skipping(clip: Clip, has_others: HasOthers) -> Iterator[Replacement]:
    """Yields what makes optimizers take no gradients as an update of other processes alone."""

    def make(original: Any) -> Any:
        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            variables = [variable for _, variable in pairs]
            has_own = any(gradient is not None for gradient, _ in pairs)
            if has_own or not has_others(variables):
                return original(self, pairs, *args, **kwargs)
            if scales(self):
                return _count_scaled(self, variables)
            return _count(self, variables, clip)

        return apply_gradients

    for kind in optimizer_bases():
        yield Replacement(kind, "apply_gradients", make)


def _count(optimizer: Any, variables: Sequence[Any], clip: Clip) -> Any:
    """Counts an update in which other processes alone have gradients."""
    if optimizer.global_clipnorm and not optimizer.clipnorm:
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise UnsupportedError(
                "an optimizer with gradient_accumulation_steps and global_clipnorm needs a "
                "gradient in every process; this one got none: leave one of the two out, or give "
                "the loss a part that depends on every partition."
            )
        clip([], optimizer.global_clipnorm, variables)  # which the others do, too
    with tf.init_scope():
        _ = optimizer.iterations  # a legacy optimizer makes the counter when it is asked for
    optimizer._iterations.assign_add(1)
    return optimizer._iterations


def _count_scaled(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Counts such an update, or the overflow of other processes, where losses are scaled."""
    own = [tf.zeros([])]  # finite, as far as this process knows
    inner, pairs = optimizer.inner_optimizer, [(None, variable) for variable in variables]

    def keep() -> None:
        inner.apply_gradients(pairs)
        if IS_KERAS_3:
            optimizer._stateful_handle_finite_grads([], variables)  # counts it for the scale

    def skip() -> None:
        inner.iterations.assign_add(1)

    if not IS_KERAS_3:
        if optimizer.dynamic:
            tf.cond(optimizer._loss_scale.update(own)[1], keep, skip)
        else:
            keep()
        return inner.iterations
    if not optimizer.built:
        if not variables:
            raise UnsupportedError(
                "a LossScaleOptimizer that was not built got no gradient in this process, where "
                "others have some: call optimizer.build(model.trainable_variables) before the "
                "first update, or give apply_gradients the variables without gradients as well, "
                "as pairs with None."
            )
        build_optimizer(optimizer, variables)
    tf.cond(optimizer.check_finite(own), keep, optimizer._stateful_handle_non_finite_grads)
    return inner.iterations


def _keras_3(clip: Clip, is_finite: IsFinite) -> Iterator[Replacement]:
    base = private("optimizers.base_optimizer").BaseOptimizer
    scaling = private("optimizers.loss_scale_optimizer").LossScaleOptimizer
    yield Replacement(base, "_clip_gradients", _clipping(clip, "_trainable_variables"))
    yield Replacement(base, "add_variable_from_reference", _noting_slots)
    yield Replacement(
        scaling,
        "check_finite",
        lambda original: lambda self, gradients: is_finite(original(self, gradients)),
    )


def _keras_2(clip: Clip, is_finite: IsFinite) -> Iterator[Replacement]:
    base = private("optimizers.optimizer").Optimizer
    yield Replacement(base, "_clip_gradients", _clipping(clip, "_smp_trained"))
    yield Replacement(base, "apply_gradients", _noting_trained)
    yield Replacement(base, "add_variable_from_reference", _noting_slots)
    # What legacy optimizers clip with is made when they are.
    yield Replacement(
        private("optimizers.utils"), "make_global_gradient_clipnorm_fn", lambda _: _legacy(clip)
    )
    yield Replacement(
        private("mixed_precision.loss_scale_optimizer"),
        "_is_all_finite",
        lambda original: lambda gradients: is_finite(original(gradients)),
    )


def _clipping(clip: Clip, trained: str) -> Callable[[Any], Any]:
    """Returns what makes optimizers clip by the norm of the whole model.

    Args:
        clip: see ``whole_model``.
        trained: the attribute in which optimizers have the variables of the gradients.
    """

    def make(original: Any) -> Any:
        def clip_gradients(self: Any, gradients: Gradients) -> Gradients:
            if self.global_clipnorm and not self.clipnorm:
                return clip(gradients, self.global_clipnorm, getattr(self, trained))
            result: Gradients = original(self, gradients)
            return result

        return clip_gradients

    return make


def _noting_trained(original: Any) -> Any:
    """Returns ``apply_gradients`` of Keras 2 such that optimizers have the variables they train."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        self._smp_trained = tuple(variable for _, variable in pairs)
        return original(self, pairs, *args, **kwargs)

    return apply_gradients


def _noting_slots(original: Any) -> Any:
    """Returns what makes an optimizer's variables such that each knows the one that it is about."""
    place = inspect.signature(original)

    def add_variable_from_reference(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = original(self, *args, **kwargs)
        _, reference, *_ = place.bind(self, *args, **kwargs).arguments.values()
        variable_of(slot)._smp_slot_of = variable_of(reference)
        return slot

    return add_variable_from_reference


def _legacy(clip: Clip) -> Callable[[Any], Any]:
    """Returns what Keras's legacy optimizers make their clipping function with."""

    def make(norm: Any) -> Any:
        def clip_pairs(pairs: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(clip(gradients, norm, variables), variables, strict=True))

        return (lambda pairs: pairs) if norm is None else clip_pairs

    return make
