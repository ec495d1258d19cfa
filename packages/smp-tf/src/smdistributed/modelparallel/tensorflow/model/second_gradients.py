"""Gradients of gradients of a call of a model, as for a penalty on the gradients of its inputs.

The gradients of inputs, weighed by what they are to be differentiated with, add up to one number.
That is the result of another call, which computes the forward pass and the inner gradients once
more; its gradients are those of the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import graphs
from smdistributed.modelparallel.tensorflow.execute.program import LocalPrograms
from smdistributed.modelparallel.tensorflow.model.signature import Signature
from smdistributed.modelparallel.tensorflow.record.structure import leaves_of
from smdistributed.modelparallel.tensorflow.record.tracing import FOLLOWS


def differentiated_again(
    engine: Any,
    step: Any,
    asked: Signature,
    wanted: Sequence[bool],
    local: LocalPrograms,
    place: int,
    given: Sequence[Any],
    upstream: dict[int, Any],
) -> tuple[list[Any], list[Any]]:
    """Returns gradients of the gradients of inputs. Collective: the pipeline.

    Args:
        engine: of the model.
        step: whose graph is being made.
        asked: what the model was called with.
        wanted: of the inputs, whether gradients can be asked for.
        local: what this process executes of the call.
        place: of the call in its microbatch.
        given: gradients of its outputs.
        upstream: by place of an input, the gradient of its gradient.

    Returns:
        gradients of the sources of the call, and of what is given.

    Raises:
        UnsupportedError: the call changes what the gradients are computed with, or draws numbers.
    """
    dys = [
        tf.convert_to_tensor(dy)
        for dy, like in zip(given, local.plan.trace.output_gradients, strict=True)
        if like is not None
    ]
    tensors = [*asked.tensors, *dys, *(upstream[each] for each in sorted(upstream))]
    key = (engine, place, asked.key, tuple(wanted), tuple(sorted(upstream)))
    if key not in step.programs:
        run = functools.partial(_run, engine, asked, len(dys), sorted(upstream))
        wishes = [*wanted, *(True for _ in dys), *(False for _ in upstream)]
        with tf.init_scope():
            made = engine.make(run, tensors, wishes, step.progress, has_effects=False)
        _refuse_changed(engine.name, local, made[1])
        step.programs[key] = made
    backward = engine.add(step, step.programs[key][1], tensors, _refuse_more)
    (total,) = backward.attached()
    found = backward.of_all([tf.ones_like(total)])
    begin, end = len(asked.tensors), len(asked.tensors) + len(dys)
    rest = iter(found[begin:end])
    of_given = [None if like is None else next(rest) for like in local.plan.trace.output_gradients]
    return [*found[:begin], *found[len(tensors) :]], of_given


def _run(
    engine: Any, asked: Signature, num_given: int, places: Sequence[int], tensors: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Returns the sum of the gradients of inputs, weighed; and no losses."""
    count = len(asked.tensors)
    inputs, given = tensors[:count], tensors[count : count + num_given]
    result, losses = engine.run_on(asked, inputs)
    outputs = [each for each in (*leaves_of(result), *losses) if tf.is_tensor(each)]
    targets = [each for each in outputs if each.dtype.is_floating or each.dtype.is_complex]
    with graphs.attributes({FOLLOWS: 1}), tf.name_scope("inner"):
        gradients = tf.compat.v1.gradients(
            targets,
            [inputs[each] for each in places],
            list(given),
            colocate_gradients_with_ops=True,
        )
    weights = tensors[count + num_given :]
    parts = [
        tf.reduce_sum(tf.convert_to_tensor(gradient) * weight)
        for gradient, weight in zip(gradients, weights, strict=True)
        if gradient is not None
    ]
    with graphs.attributes({FOLLOWS: 1}):
        return tf.add_n(parts), []


def _refuse_changed(name: str, first: LocalPrograms, again: LocalPrograms) -> None:
    """Raises if another call of the model would compute other numbers."""
    changed = {
        id(first.plan.trace.captured[key])
        for used in first.plan.resources.values()
        for key, is_changed in used.items()
        if is_changed
    }
    used = {
        id(again.plan.trace.captured[key]): is_changed
        for resources in again.plan.resources.values()
        for key, is_changed in resources.items()
    }
    if any(used.values()) or not changed.isdisjoint(used) or again.draws:
        raise UnsupportedError(
            f"gradients of gradients of a call of {name} were asked for, as for a penalty on "
            "gradients; for these the model is computed once more, with the same numbers. It "
            "draws random numbers (dropout, noise), or reads a variable that it changes: leave "
            "that out of this model, call it with training=False there, or compute the inner "
            "gradient in the model's call."
        )


def _refuse_more(*_: Any) -> Any:
    raise UnsupportedError(
        "gradients of gradients of gradients of a call of the model were asked for: compute the "
        "inner ones in the model's call, or stop them with tf.stop_gradient."
    )
