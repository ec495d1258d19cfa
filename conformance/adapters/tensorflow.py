"""TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp
from conformance.adapters.base import WIDTH, Adapter, Array
from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.tensorflow.api.start import slot

NUM_LAYERS = 4
_SHIFT = np.float32(0.5)


def weights() -> list[tuple[Array, Array]]:
    """Returns kernel and bias of each layer of ``Net``."""
    numbers = np.random.default_rng(7)
    return [
        (
            numbers.uniform(-0.4, 0.4, (WIDTH, WIDTH)).astype(np.float32),
            numbers.uniform(-0.4, 0.4, WIDTH).astype(np.float32),
        )
        for _ in range(NUM_LAYERS)
    ]


def _given(array: Array) -> Callable[..., Any]:
    """Returns an initializer for known numbers."""

    def initial(shape: Any, dtype: Any = None, **_: Any) -> Any:
        return tf.constant(array, dtype, shape)

    return initial


def dense_layers() -> list[Any]:
    """Returns the layers of ``Net``, as new ones."""
    return [
        tf.keras.layers.Dense(
            WIDTH,
            "tanh",
            kernel_initializer=_given(kernel),
            bias_initializer=_given(bias),
            name=f"dense_{i}",
        )
        for i, (kernel, bias) in enumerate(weights())
    ]


class Chain(smp.DistributedModel):  # type: ignore[misc]
    """Layers one after another.

    Args:
        layers: of Keras.
        places: the partition of each, or None where none is asked for.
    """

    def __init__(self, layers: Sequence[Any], places: Sequence[int | None] = ()) -> None:
        super().__init__(name="chain")
        self.chain = list(layers)
        self.places = list(places) or [None] * len(self.chain)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Maps what the first layer takes to what the last one gives."""
        for layer, place in zip(self.chain, self.places, strict=True):
            with nullcontext() if place is None else smp.partition(place):
                inputs = layer(inputs)
        return inputs


class Net(Chain):
    """Four layers with known weights."""

    def __init__(self) -> None:
        super().__init__(dense_layers())

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Maps [batch, WIDTH] to the same."""
        return super().call(inputs) + _SHIFT


class TensorFlowAdapter(Adapter):
    """See ``Adapter``.

    Attributes:
        tf: TensorFlow, for cases that are imported where it is not installed.
    """

    name = "tensorflow"
    smp = smp
    tf = tf

    @property
    def config(self) -> Config:
        # No documented name of this package tells it.
        return slot.get().config

    def reset(self) -> None:
        """Also makes the next model the first one, before which hooks run."""
        tf.random.set_seed(0)
        if smp.is_initialized():
            runtime = slot.get()
            runtime.is_partitioned = False
            runtime.post_partition_hooks.clear()

    def tensor(self, array: Array) -> Any:
        return tf.constant(array)

    def array(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def is_tensor(self, obj: Any) -> bool:
        return bool(tf.is_tensor(obj))

    def mean(self, tensor: Any) -> Any:
        return tf.reduce_mean(tensor)

    def model(self) -> Any:
        return Net()

    def reference(self, x: Array) -> Array:
        # Without TensorFlow, so that nothing of what is tried is used to judge it.
        for kernel, bias in weights():
            x = np.tanh(x @ kernel + bias)
        found: Array = x + _SHIFT
        return found

    def chain(self, layers: Sequence[Any] = (), places: Sequence[int | None] = ()) -> Any:
        """Returns a DistributedModel of these layers, or of those of ``model``; see ``Chain``."""
        return Chain(layers or dense_layers(), places)

    def plain(self) -> Any:
        """Returns a model of Keras that computes what ``chain`` does, unpartitioned."""
        return tf.keras.Sequential(dense_layers())

    def held(self, model: Any) -> list[set[int]]:
        """Returns which layers of a chain have variables here, for each rank of the pipeline.

        Collective: pipeline.
        """
        own = {id(variable) for variable in model.local_variables}
        here = {
            place
            for place, layer in enumerate(model.chain)
            if any(id(variable) in own for variable in layer.variables)
        }
        found: list[set[int]] = smp.allgather(here, smp.PP_GROUP)
        return found

    def gradients_by_place(self, model: Any, gradients: Sequence[Any]) -> dict[int, Array]:
        """Returns gradients of ``model.trainable_variables`` by their place in the whole chain."""
        every = [id(v) for layer in model.chain for v in layer.trainable_variables]
        return {
            every.index(id(variable)): self.array(tf.convert_to_tensor(gradient))
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True)
        }


def make() -> TensorFlowAdapter:
    """Returns the adapter."""
    # Many processes share few cores; forks of this process must not inherit threads.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return TensorFlowAdapter()
