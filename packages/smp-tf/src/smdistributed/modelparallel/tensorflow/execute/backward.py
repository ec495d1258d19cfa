"""The gradient of a call of a model in the graph of a step, as tapes and ``tf.gradients`` ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.tensorflow.compat.gradients import (
    has_tangents,
    is_vectorizing,
    present_sources,
    unrecorded,
    with_gradient,
)
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.record.tracing import tensors_in


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
    """Computes the gradients of one call, once.

    Args:
        call: see ``replay.Call``.
        values: by name of a tensor of the trace, the tensor in this graph.
        run: adds the backward programs.
        outputs: of the programs; what the call returns stands behind them.
        sources: what the call takes: inputs, then values of variables: those of the model that live
            here, others, and those that stand for missing ones.
        own: gradients in the trace of all these variables but those that stand for missing ones.
        num_missing: how many of the sources stand for missing variables.
    """

    call: Any
    values: dict[str, Any]
    run: Callable[[], None]
    outputs: Sequence[Any]
    sources: Sequence[Any]
    own: Sequence[Any]
    num_missing: int
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
        self._attached = [
            self._noting(place, each) for place, each in enumerate(results[: len(self.outputs)])
        ]
        return self._attached

    def _noting(self, place: int, output: Any) -> Any:
        """Returns an output that notes whether its gradient is known.

        TensorFlow gives zeros for outputs that a loss does not depend on.
        """

        def gradient(dy: Any) -> list[Any]:
            self._asked |= 1 << place
            return [dy]

        return with_gradient([output], gradient, "SmpOutput")[0]

    def __call__(self, *upstream: Any) -> list[Any]:
        """Returns the gradients of outputs (none) and sources, given those of the outputs."""
        if self.call.gradients is not None:
            raise SMPError(
                "gradients of one call of the model were asked for twice in a step function: "
                "ask for all of them at once, of the sum of the losses if there are several."
            )
        refuse_vectorizing()
        self._refuse_own_outputs()
        given = [
            dy if dy is not None else tf.zeros_like(output)
            for dy, output in zip(upstream, self.outputs, strict=False)
        ]
        self.call.gradients = given
        with unnoted():
            return [None] * len(self.outputs) + self._computed(given)

    def _computed(self, given: Sequence[Any]) -> list[Any]:
        """Returns the gradients of sources, given those of outputs."""
        trace = self.call.local.plan.trace
        for dy, value in zip(trace.output_gradients, given, strict=True):
            if dy is not None:
                self.values[dy.name] = tf.convert_to_tensor(value)
        with unrecorded():
            self.run()
            found = [self._found(each) for each in (*trace.input_gradients, *self.own)]
            # Of what stands for missing variables.
            found += [tf.zeros([]) for _ in range(self.num_missing)]
        return self._once(found, given)

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

    def _found(self, gradient: Any) -> Any:
        """Returns a gradient of the trace in this graph; None if no loss depends on its source."""
        trace = self.call.local.plan.trace
        depends_on = trace.dependencies(gradient)
        if depends_on and not depends_on & self._asked:
            return None
        parts = [self.values[tensor.name] for tensor in tensors_in(gradient)]
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(*parts)
        return parts[0] if parts else None

    def _once(self, found: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Returns the gradients such that a gradient of them is an error, not nothing."""
        parts = [part for each in found for part in tensors_in(each)]
        inputs = [each for each in (*self.sources, *given) if each.dtype.is_floating]

        def refuse(*_: Any) -> list[Any]:
            raise UnsupportedError(
                "gradients of gradients of a call of the model were asked for, as for a penalty "
                "on gradients: they are not computed over partitions. Compute the inner gradient "
                "in the model's call, or stop it with tf.stop_gradient."
            )

        kept = iter(with_gradient([*parts, *inputs], refuse, "SmpGradients")[: len(parts)])
        results = []
        for each in found:
            own = [next(kept) for _ in tensors_in(each)]
            results.append(
                tf.IndexedSlices(*own)
                if isinstance(each, tf.IndexedSlices)
                else (own[0] if own else None)
            )
            self.call.returned |= {part.op for part in own}
        return results
