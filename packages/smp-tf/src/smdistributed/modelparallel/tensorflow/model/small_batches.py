"""Batches with fewer examples than there are microbatches, in Keras's training loop.

Keras makes one graph for batches of all sizes, of as many microbatches. A small batch, such as the
last one of an epoch, has a graph of its own, with a microbatch for each example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


def of_all_sizes(
    model: Any, runtime: TFRuntime, usual: Any, step: Callable[[Any], Any], *, takes_lists: bool
) -> Any:
    """Returns a function for Keras's loop that takes small batches as well.

    That of Keras 3: with Keras 2 they are an error. So they are with replicas, of which each may
    have a batch of another size: what they exchange belongs to a graph.

    Args:
        model: that is trained.
        runtime: of this process.
        usual: Keras's function.
        step: what it does with a batch.
        takes_lists: whether it takes lists of batches, not iterators.
    """
    can_be_few = runtime.config.microbatches > 1 and runtime.topology.dp_size == 1
    if not keras.IS_KERAS_3 or not can_be_few or isinstance(usual, _Steps):
        return usual
    kind = _StepsOnLists if takes_lists else _Steps
    return kind(model, usual, step, runtime.config.microbatches)


class _Steps:
    """What Keras calls with an iterator over batches, for one step.

    Args:
        model: that is trained.
        usual: Keras's function.
        step: takes a batch.
        microbatches: of a batch that is not small.
    """

    def __init__(
        self, model: Any, usual: Any, step: Callable[[Any], Any], microbatches: int
    ) -> None:
        self._model = model
        self._usual = usual
        self._microbatches = microbatches
        self._step = step
        self._functions: dict[str, Any] = {}

    def __call__(self, iterator: Any) -> Any:
        """Runs a step on the next batch.

        Raises:
            StopIteration: there is none.
        """
        if self._model.steps_per_execution != 1:
            return self._usual(iterator)
        batch = next(iterator)
        if self._is_small(batch):
            return self._of_one_size(batch)
        if not isinstance(iterator, tf.data.Iterator):  # of train_on_batch
            return self._usual(iter([batch]))
        return self._function(repr(iterator.element_spec), [iterator.element_spec])(batch)

    def _of_one_size(self, batch: Any) -> Any:
        shapes = [getattr(each, "shape", None) for each in tf.nest.flatten(batch)]
        return self._function(repr(shapes), None)(batch)

    def _function(self, key: str, signature: Any) -> Any:
        if key not in self._functions:
            run = _without_missing(self._step)
            self._functions[key] = tf.function(run, input_signature=signature, autograph=False)
        return self._functions[key]

    def _is_small(self, batch: Any) -> bool:
        shape = getattr(tf.nest.flatten(batch)[0], "shape", None)
        size = shape[0] if shape else None
        return size is not None and size < self._microbatches


class _StepsOnLists(_Steps):
    """The same for lists of one batch, which Keras has for predictions."""

    def __call__(self, batches: Any) -> Any:
        """Runs a step on each batch."""
        if len(batches) == 1 and self._is_small(batches[0]):
            return self._of_one_size(batches[0])
        return self._usual(batches)


def _without_missing(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a step on a batch in which Keras has an empty optional where there is nothing."""

    def run(batch: Any) -> Any:
        def given(leaf: Any) -> Any:
            return None if isinstance(leaf, tf.experimental.Optional) else leaf

        return step(tf.nest.map_structure(given, batch))

    return run
