"""Step functions, and gradients beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.api.start import slot
from smdistributed.modelparallel.tensorflow.gradients.replicas import averaged, broadcast_from_first
from smdistributed.modelparallel.tensorflow.stepping import function as stepping


def step(
    non_split_inputs: Iterable[str] | Callable[..., Any] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Decorates a function that computes one mini-batch: outputs, losses, gradients.

    Usable as ``@smp.step``, ``@smp.step()`` and ``@smp.step(...)``, eagerly and inside the caller's
    ``tf.function``. See ``StepFunction`` for what a call does. Collective: every process.

    Args:
        non_split_inputs: names of arguments given whole to every microbatch; or the function,
            when used without parentheses.
        input_split_axes: batch axis by argument name; 0 for all others.
        args: an ``input_signature``, the first that ``tf.function`` takes besides the function.
        kwargs: what ``tf.function`` takes.

    Shape: an argument of (batch, ...) is (microbatch, ...) in the function. The sizes of
        microbatches differ by at most one, larger first.

    Raises:
        ConfigError: an option names no argument of the function.
        TypeError: more than one argument by position besides.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    if len(args) > 1:
        raise TypeError(
            "smp.step takes non_split_inputs, input_split_axes and input_signature by position; "
            f"received {len(args) - 1} more: give them by keyword."
        )
    options = dict(zip(("input_signature",), args, strict=False)) | kwargs
    function, names = non_split_inputs, None
    if not callable(function):
        function, names = None, function
    return stepping.step(
        slot, function, non_split_inputs=names, input_split_axes=input_split_axes, **options
    )


def allreduce(value: Any) -> Any:
    """Returns the mean of a tensor over the data-parallel group of this process.

    For gradients after ``accumulate``, where the script does not call Horovod itself. With
    ``horovod: True`` this is Horovod's, else TensorFlow's own. Collective: the data-parallel group.

    Shape: that of ``value``, which is the same on all ranks of the group.
    """
    return averaged(slot.get(), value)


def clip_by_global_norm(gradients: Sequence[Any], clip_norm: Any) -> tuple[list[Any], Any]:
    """Returns gradients, scaled such that all together have at most a norm, and their norm.

    The same as ``tf.clip_by_global_norm``, whose norm is that of the gradients of all partitions.
    Keras's optimizers with ``global_clipnorm`` do that by themselves. Usable eagerly and in a
    ``tf.function``. Collective: every process of the pipeline.

    Args:
        gradients: tensors, ``tf.IndexedSlices``, None.
        clip_norm: greatest norm.

    Shape: those of the gradients; the norm is a scalar.
    """
    slot.get()
    clipped, norm = tf.clip_by_global_norm(list(gradients), clip_norm)
    return clipped, norm


def broadcast_variables(variables: Iterable[Any]) -> None:
    """Gives variables the values that the first rank of the data-parallel group has.

    After the first batch, for the model's and the optimizer's. Collective: the data-parallel group.

    Shape: a variable has the same one on all ranks of the group.
    """
    broadcast_from_first(slot.get(), list(variables))
