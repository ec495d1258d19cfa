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
from smdistributed.modelparallel.tensorflow.compat.isolation import apart
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
from smdistributed.modelparallel.tensorflow.compat.variables import empty_variable

Gradients = Sequence[Any]
#: Takes what computes a norm, gradients of this process and their variables; returns the norm of
#: the gradients of all processes.
Norm = Callable[[Any, Gradients, Sequence[Any]], Any]
#: Takes whether the gradients of this process are finite, a tensor; returns whether those of all.
IsFinite = Callable[[Any], Any]
#: Takes a variable; tells whether another process has its value.
IsElsewhere = Callable[[Any], bool]
#: Takes a variable that an optimizer keeps of another one, and that one.
NoteSlot = Callable[[Any, Any], None]
#: Takes pairs of gradients and variables; returns them as each process needs them.
Given = Callable[[Sequence[tuple[Any, Any]]], list[tuple[Any, Any]]]
#: Takes gradients and the variables that are to be updated by them; raises if that cannot be.
Check = Callable[[Sequence[Any], Sequence[Any]], None]


def whole_model(
    norm: Norm,
    is_finite: IsFinite,
    is_elsewhere: IsElsewhere,
    note: NoteSlot,
    given: Given,
    check: Check,
) -> AbstractContextManager[None]:
    """Within, optimizers decide by the gradients of all processes, and update what is here.

    They know all variables, and have no memory for what they keep of those of other processes. An
    update of those alone is counted.

    Args:
        norm: returns the norm that gradients have together with those of the other processes.
        is_finite: tells whether all processes have finite gradients.
        is_elsewhere: tells whether another process updates a variable.
        note: is told of what an optimizer keeps of a variable.
        given: is asked for what each process needs of an update.
        check: is called before each update.
    """
    kind = _keras_3 if IS_KERAS_3 else _keras_2
    slots = _slots(is_elsewhere, note)
    deciding = [*kind(norm, is_finite), *slots, *_updating(norm, is_elsewhere, given, check)]
    return replaced([*deciding, *_checking(check)])


def _updating(
    norm: Norm, is_elsewhere: IsElsewhere, given: Given, check: Check
) -> Iterator[Replacement]:
    """Yields what makes optimizers update the variables that are here."""

    def update(optimizer: Any, pairs: list[tuple[Any, Any]], apply: Callable[[Any], Any]) -> Any:
        pairs = given(pairs)
        kept = [(gradient, variable) for gradient, variable in pairs if not is_elsewhere(variable)]
        variables = [variable for _, variable in pairs]
        # From here on processes do other things than each other.
        with unnoted():
            # A tf.function that sees new variables is made again, on processes that have some.
            if pairs and not hasattr(optimizer, "_create_all_weights"):  # legacy ones make each
                apart(lambda: build_optimizer(optimizer, variables))
            if len(kept) == len(pairs) or all(gradient is None for gradient, _ in pairs):
                return apply(pairs)
            if all(gradient is None for gradient, _ in kept):
                count = _count_scaled if scales(optimizer) else _count
                return count(optimizer, variables, norm)
            _refuse_counting(optimizer)
            return apply(kept)

    def of_pairs(original: Any) -> Any:
        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            if not pairs:
                _checked(check, [], [])
            return update(self, pairs, lambda some: original(self, some, *args, **kwargs))

        return apply_gradients

    def of_lists(original: Any) -> Any:
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            gradients, variables = list(grads), _given(self, trainable_variables)
            if not gradients:
                _checked(check, [], variables)
            if len(gradients) != len(variables):
                return original(self, gradients, trainable_variables)
            pairs = list(zip(gradients, variables, strict=True))
            return update(
                self, pairs, lambda some: original(self, *map(list, zip(*some, strict=True)))
            )

        return apply

    def not_empty(original: Any) -> Any:
        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            if not pairs:
                _checked(check, [], [])
            return original(self, pairs, *args, **kwargs)

        return apply_gradients

    # With Keras 3 ``apply_gradients`` calls ``apply``, which may be the user's, of all gradients.
    for kind in optimizer_bases():
        yield Replacement(kind, "apply_gradients", not_empty if IS_KERAS_3 else of_pairs)
    if IS_KERAS_3:
        yield Replacement(private("optimizers.base_optimizer").BaseOptimizer, "apply", of_lists)
        scaling = private("optimizers.loss_scale_optimizer").LossScaleOptimizer
        yield Replacement(scaling, "apply", of_lists)


def _refuse_counting(optimizer: Any) -> None:
    """Raises if an update of some variables makes other numbers of them than one of all.

    Raises:
        UnsupportedError: the Nadam of Keras 2 counts the variables of a function in Python, while
            it is made, and multiplies what all share as often.
    """
    if hasattr(optimizer, "_u_product_counter") and not tf.executing_eagerly():
        error = UnsupportedError(
            "Nadam of Keras 2 computes otherwise in a function (fit, tf.function) the more "
            "variables it updates there, and over partitions each process updates its own: call "
            "apply_gradients outside of functions, or take tf.keras.optimizers.legacy.Nadam, Adam, "
            "or Keras 3."
        )
        autograph.pass_through(error)
        raise error


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


def _count(optimizer: Any, variables: Sequence[Any], norm: Norm) -> Any:
    """Counts an update in which other processes alone have gradients."""
    if optimizer.global_clipnorm and not optimizer.clipnorm:
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise UnsupportedError(
                "an optimizer with gradient_accumulation_steps and global_clipnorm needs a "
                "gradient in every process; this one got none: leave one of the two out, or give "
                "the loss a part that depends on every partition."
            )
        norm(tf.linalg.global_norm, [], [])  # which the others ask for, too
    with tf.init_scope():
        _ = optimizer.iterations  # a legacy optimizer makes the counter when it is asked for
    optimizer._iterations.assign_add(1)
    return optimizer._iterations


def _count_scaled(optimizer: Any, variables: Sequence[Any], norm: Norm) -> Any:
    """Counts such an update, or the overflow of other processes, where losses are scaled."""
    own = [tf.zeros([])]  # finite, as far as this process knows
    inner = optimizer.inner_optimizer

    def keep() -> None:
        if IS_KERAS_3:
            optimizer._stateful_handle_finite_grads([], variables)  # the scale may grow
        _count(inner, variables, norm)

    def skip() -> None:
        inner.iterations.assign_add(1)

    if not IS_KERAS_3:
        if optimizer.dynamic:
            tf.cond(optimizer._loss_scale.update(own)[1], keep, skip)
        else:
            keep()
        return inner.iterations
    tf.cond(optimizer.check_finite(own), keep, optimizer._stateful_handle_non_finite_grads)
    return inner.iterations


def _keras_3(norm: Norm, is_finite: IsFinite) -> Iterator[Replacement]:
    base = private("optimizers.base_optimizer").BaseOptimizer
    scaling = private("optimizers.loss_scale_optimizer").LossScaleOptimizer
    yield Replacement(base, "_clip_gradients", _clipping(norm))
    yield Replacement(base, "_backend_apply_gradients", _noting_applied)
    yield Replacement(
        scaling,
        "check_finite",
        lambda original: unnoted()(lambda self, gradients: is_finite(original(self, gradients))),
    )


def _keras_2(norm: Norm, is_finite: IsFinite) -> Iterator[Replacement]:
    base = private("optimizers.optimizer").Optimizer
    yield Replacement(base, "_clip_gradients", _clipping(norm))
    yield Replacement(base, "apply_gradients", _noting_trained)
    # What legacy optimizers clip with is made when they are.
    yield Replacement(
        private("optimizers.utils"), "make_global_gradient_clipnorm_fn", lambda _: _legacy(norm)
    )
    yield Replacement(
        private("mixed_precision.loss_scale_optimizer"),
        "_is_all_finite",
        lambda original: unnoted()(lambda gradients: is_finite(original(gradients))),
    )


def _clipping(norm: Norm) -> Callable[[Any], Any]:
    """Returns what makes optimizers clip by the norm of the whole model.

    Args:
        norm: see ``whole_model``.
    """

    def make(original: Any) -> Any:
        def clip_gradients(self: Any, gradients: Gradients) -> Gradients:
            if self.global_clipnorm and not self.clipnorm:
                return _clipped(gradients, self.global_clipnorm, self._smp_trained(), norm)
            result: Gradients = original(self, gradients)
            return result

        return clip_gradients

    return make


def _clipped(gradients: Gradients, most: Any, variables: Sequence[Any], norm: Norm) -> Gradients:
    """Returns gradients, scaled as Keras does it, such that all together have at most a norm."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    present, theirs = [g for g, _ in pairs], [v for _, v in pairs]
    if not IS_KERAS_3:
        with unnoted():
            whole = norm(tf.linalg.global_norm, present, theirs)
        return list(tf.clip_by_global_norm(list(gradients), most, use_norm=whole)[0])
    with unnoted():
        whole = norm(private("optimizers.base_optimizer").global_norm, present, theirs)
    # No finite norm makes no finite gradient. The product of slices is dense, as it is in Keras,
    # whose optimizers update by slices in another way.
    scale = most * tf.minimum(1.0 / whole, 1.0 / most) + (whole - whole)
    return [each if each is None else each * scale for each in gradients]


def _note_trained(optimizer: Any, variables: Sequence[Any]) -> None:
    """Notes what an optimizer is about to update, past what Keras does with attributes."""
    object.__setattr__(optimizer, "_smp_trained", lambda: variables)


def _noting_applied(original: Any) -> Any:
    """Returns what optimizers of Keras 3 update with, such that they have the variables."""

    def apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        _note_trained(self, trainable_variables)
        return original(self, grads, trainable_variables)

    return apply_gradients


def _noting_trained(original: Any) -> Any:
    """Returns ``apply_gradients`` of Keras 2 such that optimizers have the variables they train."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        _note_trained(self, [variable for gradient, variable in pairs if gradient is not None])
        return original(self, pairs, *args, **kwargs)

    return apply_gradients


def _slots(is_elsewhere: IsElsewhere, note: NoteSlot) -> Iterator[Replacement]:
    """Yields what makes an optimizer's variables such that each knows the one that it is about.

    They have no memory where that one is elsewhere.
    """

    def make(original: Any) -> Any:
        place = inspect.signature(original)

        def add_variable_from_reference(self: Any, *args: Any, **kwargs: Any) -> Any:
            _, reference, *_ = place.bind(self, *args, **kwargs).arguments.values()
            if is_elsewhere(reference):
                with tf.variable_creator_scope(_without_memory):
                    slot = original(self, *args, **kwargs)
            else:
                slot = original(self, *args, **kwargs)
            variable_of(slot)._smp_slot_of = variable_of(reference)
            note(slot, variable_of(reference))
            return slot

        return add_variable_from_reference

    if IS_KERAS_3:
        base = private("optimizers.base_optimizer").BaseOptimizer
    else:
        base = private("optimizers.optimizer").Optimizer
    yield Replacement(base, "add_variable_from_reference", make)


def _without_memory(_: Any, **arguments: Any) -> Any:
    """Makes a variable without memory; a creator as ``tf.variable_creator_scope`` takes it."""
    value = arguments.get("initial_value")
    with unnoted():
        like = tf.convert_to_tensor(value() if callable(value) else value, arguments.get("dtype"))
    return empty_variable(like, arguments)


def _legacy(norm: Norm) -> Callable[[Any], Any]:
    """Returns what Keras's legacy optimizers make their clipping function with."""

    def make(most: Any) -> Any:
        def clip_pairs(pairs: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(_clipped(gradients, most, variables, norm), variables, strict=True))

        return (lambda pairs: pairs) if most is None else clip_pairs

    return make
