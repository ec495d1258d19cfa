"""TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp
from conformance.adapters.base import WIDTH, Adapter, Array
from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.tensorflow.api import slot

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


class Net(smp.DistributedModel):  # type: ignore[misc]
    """Four layers with known weights."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.dense = dense_layers()

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Maps [batch, WIDTH] to the same."""
        for layer in self.dense:
            inputs = layer(inputs)
        return inputs + _SHIFT


class TensorFlowAdapter(Adapter):
    """See ``Adapter``."""

    name = "tensorflow"
    smp = smp

    @property
    def config(self) -> Config:
        # No documented name of this package tells it.
        return slot.get().config

    def reset(self) -> None:
        tf.random.set_seed(0)

    def tensor(self, array: Array) -> Any:
        return tf.constant(array)

    def array(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def is_tensor(self, obj: Any) -> bool:
        return bool(tf.is_tensor(obj))

    def model(self) -> Any:
        return Net()

    def reference(self, x: Array) -> Array:
        # Without TensorFlow, so that nothing of what is tried is used to judge it.
        for kernel, bias in weights():
            x = np.tanh(x @ kernel + bias)
        found: Array = x + _SHIFT
        return found


def make() -> TensorFlowAdapter:
    """Returns the adapter."""
    # Many processes share few cores; forks of this process must not inherit threads.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return TensorFlowAdapter()
