"""Initial values of variables, asked for once, in order, and computed where they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, lift_to_graph
from tensorflow.python.framework import ops, random_seed


class InitialValue:
    """What a variable begins with.

    The function that gives it runs once, here, as it does in Keras: it may draw from generators of
    NumPy or Python, whose next numbers are for the next variable. The operations of TensorFlow that
    it makes are only noted, so that they take memory in one process alone.

    Args:
        function: returns the value.
        dtype: of the variable; None takes that of the value.

    Attributes:
        like: a tensor of its shape and dtype, without numbers.
    """

    def __init__(self, function: Callable[[], Any], dtype: Any) -> None:
        def compute() -> Any:
            _draw_seeds_as_eagerly()
            return tf.convert_to_tensor(function(), dtype=dtype)

        with tf.init_scope():
            self._computed = tf.function(compute, autograph=False).get_concrete_function()
            (self.like,) = self._computed.outputs
            self._value = None
            if any(each.dtype == tf.resource for each in self._computed.captured_inputs):
                # It reads a state, a generator of TensorFlow's for example, which others read next.
                self._value = self._computed()

    def value(self) -> Any:
        """Returns the value."""
        with tf.init_scope():
            return self._computed() if self._value is None else self._value


def lifted(tensor: Any) -> Callable[[], Any]:
    """Returns what computes a tensor of a graph that is being made, without that graph.

    Raises (what it returns):
        Exception: the tensor depends on what the graph is given.
    """
    return lambda: lift_to_graph.lift_to_graph([tensor], ops.get_default_graph())[tensor]


class _EagerSeeds:
    """Stands for a graph's count of random operations; gives them the seeds of eager ones."""

    def __mod__(self, bound: int) -> int:
        return int(context.internal_operation_seed()) % bound

    def __add__(self, other: int) -> _EagerSeeds:
        return self


def _draw_seeds_as_eagerly() -> None:
    """Lets random operations of the present graph have the seeds that they had outside of it."""
    graph = tf.compat.v1.get_default_graph()
    with tf.init_scope():
        graph.seed = context.global_seed()
    random_seed._graph_to_seed_dict[graph] = _EagerSeeds()
