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
from smdistributed.modelparallel.tensorflow.compat import autograph
from smdistributed.modelparallel.tensorflow.compat.keras import (
    IS_KERAS_3,
    build_optimizer,
    optimizer_bases,
    private,
    scales,
    variable_of,
)
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

Gradients = Sequence[Any]
#: Takes the norm of this process's gradients, and the variables; returns that of all gradients.
Norm = Callable[[Any, Sequence[Any]], Any]
#: Takes whether the gradients of this process are finite, a tensor; returns whether those of all.
IsFinite = Callable[[Any], Any]
#: Takes variables of which none has a gradient in this process; tells whether others may have some.
HasOthers = Callable[[Sequence[Any]], bool]
#: Takes gradients and the variables that are to be updated by them; raises if that cannot be.
Check = Callable[[Sequence[Any], Sequence[Any]], None]


def whole_model(
    norm: Norm, is_finite: IsFinite, has_others: HasOthers, check: Check
) -> AbstractContextManager[None]:
    """Within, optimizers decide by the gradients of all processes.

    One that gets no gradient in this process counts the update, where Keras raises.

    Args:
        norm: returns the norm that gradients have together with those of the other processes.
        is_finite: tells whether all processes have finite gradients.
        has_others: tells whether other processes may have gradients where this one has none.
        check: is called before each update.
    """
    kind = _keras_3 if IS_KERAS_3 else _keras_2
    deciding = [*kind(norm, is_finite), *_skipping(norm, has_others, check)]
    return replaced([*deciding, *_finalizing(has_others), *_checking(check)])


def _skipping(norm: Norm, has_others: HasOthers, check: Check) -> Iterator[Replacement]:
    """Yields what makes optimizers take no gradients as an update of other processes alone."""

    def count(optimizer: Any, variables: Sequence[Any]) -> Any:
        if not variables:
            _checked(check, [], [])
        if scales(optimizer):
            return _count_scaled(optimizer, variables)
        return _count(optimizer, variables, norm)

    def of_pairs(original: Any) -> Any:
        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            variables = [variable for _, variable in pairs]
            if any(each is not None for each, _ in pairs) or not has_others(variables):
                return original(self, pairs, *args, **kwargs)
            return count(self, variables)

        return apply_gradients

    def of_lists(original: Any) -> Any:
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            gradients, variables = list(grads), _given(self, trainable_variables)
            if any(each is not None for each in gradients) or not has_others(variables):
                original(self, gradients, trainable_variables)
            else:
                count(self, variables)

        return apply

    for kind in optimizer_bases():
        yield Replacement(kind, "apply_gradients", of_pairs)
    if IS_KERAS_3:
        yield Replacement(private("optimizers.base_optimizer").BaseOptimizer, "apply", of_lists)
        scaling = private("optimizers.loss_scale_optimizer").LossScaleOptimizer
        yield Replacement(scaling, "apply", of_lists)


def _given(optimizer: Any, variables: Any) -> list[Any]:
    """Returns the variables that an update of Keras 3 is of, where it may leave them out."""
    return list(optimizer._trainable_variables if variables is None else variables)


def _checking(check: Check) -> Iterator[Replacement]:
    """Yields what looks at each update before it is made."""

    def of_pairs(original: Any) -> Any:
        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            _checked(check, [gradient for gradient, _ in pairs], [one for _, one in pairs])
            return original(self, pairs, *args, **kwargs)

        return apply_gradients

    def of_lists(original: Any) -> Any:
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            gradients = list(grads)
            _checked(check, gradients, _given(self, trainable_variables))
            return original(self, gradients, trainable_variables)

        return apply

    if IS_KERAS_3:
        yield Replacement(private("optimizers.base_optimizer").BaseOptimizer, "apply", of_lists)
    else:
        for kind in optimizer_bases():
            yield Replacement(kind, "apply_gradients", of_pairs)


def _checked(check: Check, gradients: Gradients, variables: Sequence[Any]) -> None:
    try:
        check(gradients, variables)
    except Exception as error:
        autograph.pass_through(error)
        raise


def _finalizing(has_others: HasOthers) -> Iterator[Replacement]:
    """Yields what makes an optimizer give averages to the variables that it trains itself.

    The training loop of Keras 3 asks for those of the whole model, Keras 2 for those of a process.
    """

    def make(original: Any) -> Any:
        def finalize_variable_values(self: Any, var_list: Any) -> None:
            original(self, self._trainable_variables if has_others(var_list) else var_list)

        return finalize_variable_values

    if IS_KERAS_3:
        base = private("optimizers.base_optimizer").BaseOptimizer
        yield Replacement(base, "finalize_variable_values", make)


def _count(optimizer: Any, variables: Sequence[Any], norm: Norm) -> Any:
    """Counts an update in which other processes alone have gradients."""
    if optimizer.global_clipnorm and not optimizer.clipnorm:
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise UnsupportedError(
                "an optimizer with gradient_accumulation_steps and global_clipnorm needs a "
                "gradient in every process; this one got none: leave one of the two out, or give "
                "the loss a part that depends on every partition."
            )
        norm(tf.zeros([]), variables)  # which the others ask for, too
    with tf.init_scope():
        _ = optimizer.iterations  # a legacy optimizer makes the counter when it is asked for
    optimizer._iterations.assign_add(1)
    return optimizer._iterations


def _count_scaled(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Counts such an update, or the overflow of other processes, where losses are scaled."""
    own = [tf.zeros([])]  # finite, as far as this process knows
    inner, pairs = optimizer.inner_optimizer, [(None, variable) for variable in variables]

    def keep() -> None:
        if IS_KERAS_3:
            optimizer._stateful_handle_finite_grads([], variables)  # by ``apply``, and the scale
        else:
            inner.apply_gradients(pairs)

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


def _keras_3(norm: Norm, is_finite: IsFinite) -> Iterator[Replacement]:
    base = private("optimizers.base_optimizer").BaseOptimizer
    scaling = private("optimizers.loss_scale_optimizer").LossScaleOptimizer
    yield Replacement(base, "_clip_gradients", _clipping(norm, "_trainable_variables"))
    yield Replacement(base, "add_variable_from_reference", _noting_slots)
    yield Replacement(
        scaling,
        "check_finite",
        lambda original: unnoted()(lambda self, gradients: is_finite(original(self, gradients))),
    )


def _keras_2(norm: Norm, is_finite: IsFinite) -> Iterator[Replacement]:
    base = private("optimizers.optimizer").Optimizer
    yield Replacement(base, "_clip_gradients", _clipping(norm, "_smp_trained"))
    yield Replacement(base, "apply_gradients", _noting_trained)
    yield Replacement(base, "add_variable_from_reference", _noting_slots)
    # What legacy optimizers clip with is made when they are.
    yield Replacement(
        private("optimizers.utils"), "make_global_gradient_clipnorm_fn", lambda _: _legacy(norm)
    )
    yield Replacement(
        private("mixed_precision.loss_scale_optimizer"),
        "_is_all_finite",
        lambda original: unnoted()(lambda gradients: is_finite(original(gradients))),
    )


def _clipping(norm: Norm, trained: str) -> Callable[[Any], Any]:
    """Returns what makes optimizers clip by the norm of the whole model.

    Args:
        norm: see ``whole_model``.
        trained: the attribute in which optimizers have the variables of the gradients.
    """

    def make(original: Any) -> Any:
        def clip_gradients(self: Any, gradients: Gradients) -> Gradients:
            if self.global_clipnorm and not self.clipnorm:
                return _clipped(gradients, self.global_clipnorm, getattr(self, trained), norm)
            result: Gradients = original(self, gradients)
            return result

        return clip_gradients

    return make


def _clipped(gradients: Gradients, most: Any, variables: Sequence[Any], norm: Norm) -> Gradients:
    """Returns gradients, scaled as Keras does it, such that all together have at most a norm."""
    present = [each for each in gradients if each is not None]
    if not IS_KERAS_3:
        with unnoted():
            whole = norm(tf.linalg.global_norm(present) if present else tf.zeros([]), variables)
        return list(tf.clip_by_global_norm(list(gradients), most, use_norm=whole)[0])
    norm_of = private("optimizers.base_optimizer").global_norm
    with unnoted():
        whole = norm(norm_of(present) if present else tf.zeros([]), variables)
    # No finite norm makes no finite gradient. The product of slices is dense, as it is in Keras,
    # whose optimizers update by slices in another way.
    scale = most * tf.minimum(1.0 / whole, 1.0 / most) + (whole - whole)
    return [each if each is None else each * scale for each in gradients]


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


def _legacy(norm: Norm) -> Callable[[Any], Any]:
    """Returns what Keras's legacy optimizers make their clipping function with."""

    def make(most: Any) -> Any:
        def clip_pairs(pairs: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(_clipped(gradients, most, variables, norm), variables, strict=True))

        return (lambda pairs: pairs) if most is None else clip_pairs

    return make
