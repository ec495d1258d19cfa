"""The gradient of a call of a model in the graph of a step, as tapes and ``tf.gradients`` ask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat.gradients import (
    has_tangents,
    is_vectorizing,
    present_sources,
    reach,
    unrecorded,
    with_gradient,
)
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.record.tracing import tensors_in

#: Takes the gradients of outputs for which those of inputs were computed, and by place of an input
#: the gradient of its gradient; returns the gradients of these numbers' sum: of the sources of the
#: call, and of the gradients of outputs.
Differentiate = Callable[[Sequence[Any], dict[int, Any]], tuple[list[Any], list[Any]]]


def refuse_vectorizing() -> None:
    """Raises if the present operations are to be vectorized."""
    if is_vectorizing():
        raise UnsupportedError(
            "a call of the model, or its gradients, cannot be vectorized (tape.jacobian, "
            "tape.batch_jacobian, tf.vectorized_map): transfers between partitions have no "
            "vectorized form. Use experimental_use_pfor=False or tf.map_fn, or compute it in the "
            "model's call."
        )


@dataclass(eq=False)
class Backward:
    """Computes the gradients of one call, as often as they are asked for.

    Args:
        call: see ``replay.Call``.
        values: by name of a tensor of the trace, the tensor in this graph.
        ask: adds the backward programs, given gradients of outputs and such values, to which it
            adds; returns the ``replay.Request``.
        outputs: of the programs; what the call returns stands behind them.
        sources: what the call takes: inputs, then values of variables: those of the model that live
            here, others, and the anchors of the library.
        own: gradients in the trace of all these variables but the anchors.
        absent: variables that live elsewhere, and their gradients in the trace.
        num_anchors: how many of the sources are anchors.
        differentiate: computes gradients of gradients.
    """

    call: Any
    values: dict[str, Any]
    ask: Callable[[list[Any], dict[str, Any]], Any]
    outputs: Sequence[Any]
    sources: Sequence[Any]
    own: Sequence[Any]
    absent: Sequence[tuple[Any, Any]]
    num_anchors: int
    differentiate: Differentiate
    _asked: int = field(default=0, init=False)
    _attached: list[Any] = field(default_factory=list, init=False)

    def attached(self) -> list[Any]:
        """Returns the outputs with this as their gradient.

        Raises:
            UnsupportedError: derivatives are to go forward.
        """
        if has_tangents(self.sources):
            raise UnsupportedError(
                "tf.autodiff.ForwardAccumulator follows what a call of the model is given; "
                "derivatives do not go forward over partitions: use tf.GradientTape."
            )
        results = with_gradient([*self.outputs, *self.sources], self, "SmpCall")
        self.call.results = results[0].op

        def note(place: int) -> None:
            self._asked |= 1 << place

        self._attached = [
            _noting(each, functools.partial(note, place))
            for place, each in enumerate(results[: len(self.outputs)])
        ]
        return self._attached

    def __call__(self, *upstream: Any) -> list[Any]:
        """Returns the gradients of outputs (none) and sources, given those of the outputs."""
        refuse_vectorizing()
        self._refuse_own_outputs()
        given = [
            dy if dy is not None else tf.zeros_like(output)
            for dy, output in zip(upstream, self.outputs, strict=False)
        ]
        asked, self._asked = self._asked, 0
        with unnoted():
            return [None] * len(self.outputs) + self._computed(given, asked)

    def of_all(self, given: list[Any]) -> list[Any]:
        """Returns the gradients of sources of a loss that depends on all outputs."""
        return self._computed(given, (1 << len(self.outputs)) - 1)

    def _computed(self, given: list[Any], asked: int) -> list[Any]:
        """Returns the gradients of sources, given those of outputs.

        Args:
            given: gradients of outputs.
            asked: outputs that a loss depends on, a bit each.
        """
        trace = self.call.local.plan.trace
        values = dict(self.values)
        for dy, value in zip(trace.output_gradients, given, strict=True):
            if dy is not None:
                values[dy.name] = tf.convert_to_tensor(value)
        with unrecorded():
            request = self.ask(given, values)
            gradients = (*trace.input_gradients, *self.own)
            found = [self._found(each, values, asked) for each in gradients]
            found += [tf.zeros([]) for _ in range(self.num_anchors)]
        for variable, gradient in self.absent:
            if gradient is not None and self._depends(gradient, asked):
                reach(variable, gradient)
        return self._once(found, request)

    def _refuse_own_outputs(self) -> None:
        """Raises if a gradient of one output by another one is asked for: it would be None."""
        sources = {id(each) for each in present_sources()}
        own = [place for place, each in enumerate(self._attached) if id(each) in sources]
        if own and self._asked & ~sum(1 << place for place in own):
            raise UnsupportedError(
                "the gradient of one result of a call of the model by another result of it was "
                "asked for, as for maps of activations: results are computed together. Compute "
                "that gradient in the model's call, with a tf.GradientTape there."
            )

    def _found(self, gradient: Any, values: dict[str, Any], asked: int) -> Any:
        """Returns a gradient of the trace in this graph; None if no loss depends on its source."""
        if not self._depends(gradient, asked):
            return None
        parts = [values[tensor.name] for tensor in tensors_in(gradient)]
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(*parts)
        return parts[0] if parts else None

    def _depends(self, gradient: Any, asked: int) -> bool:
        """Tells whether a loss depends on what a gradient of the trace is of."""
        depends_on = self.call.local.plan.trace.dependencies(gradient)
        return not depends_on or bool(depends_on & asked)

    def _once(self, found: Sequence[Any], request: Any) -> list[Any]:
        """Returns the gradients with gradients of their own."""
        parts = [part for each in found for part in tensors_in(each)]
        places = [place for place, each in enumerate(found) for _ in tensors_in(each)]
        inputs = [each for each in (*self.sources, *request.given) if each.dtype.is_floating]
        asked: set[int] = set()

        def gradient(*upstream: Any) -> list[Any]:
            if any(
                place >= len(self.call.inputs) or isinstance(found[place], tf.IndexedSlices)
                for place in asked
            ):
                raise UnsupportedError(
                    "gradients of gradients of a call of the model are computed for gradients of "
                    "what it is called with, as for a penalty on them; received those of "
                    "variables: compute the inner gradient in the model's call, or stop it with "
                    "tf.stop_gradient."
                )
            of_inputs = {
                place: dy for place, dy in zip(places, upstream, strict=False) if place in asked
            }
            asked.clear()
            with unnoted(), unrecorded():
                of_sources, of_given = self.differentiate(request.given, of_inputs)
            pairs = zip((*self.sources, *request.given), (*of_sources, *of_given), strict=True)
            own = [each for source, each in pairs if source.dtype.is_floating]
            return [None] * len(parts) + own

        results = with_gradient([*parts, *inputs], gradient, "SmpGradients")[: len(parts)]
        request.returned |= {part.op for part in results}
        kept = iter(
            [
                _noting(part, functools.partial(asked.add, place))
                for part, place in zip(results, places, strict=True)
            ]
        )
        return [
            tf.IndexedSlices(*(next(kept) for _ in tensors_in(each)))
            if isinstance(each, tf.IndexedSlices)
            else (None if each is None else next(kept))
            for each in found
        ]


def _noting(tensor: Any, note: Callable[[], None]) -> Any:
    """Returns a tensor that notes that its gradient is known.

    TensorFlow gives zeros for those that a loss does not depend on.
    """

    def gradient(dy: Any) -> list[Any]:
        note()
        return [dy]

    return with_gradient([tensor], gradient, "SmpNoting")[0]
