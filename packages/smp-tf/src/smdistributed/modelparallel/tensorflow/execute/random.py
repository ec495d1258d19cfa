"""Random operations with numbers that depend on the step and the microbatch, not on the process.

TensorFlow's stateful random operations count how often they ran, each kernel for itself. A model
that is spread over processes and called once a microbatch would then draw other numbers for each
way to cut it. In a program they are replaced by stateless ones, keyed by the seeds of the operation
(or its place in the model), the step and the microbatch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.record.tracing import Trace

_KINDS = {
    "RandomUniform": tf.random.stateless_uniform,
    "RandomStandardNormal": tf.random.stateless_normal,
    "TruncatedNormal": tf.random.stateless_truncated_normal,
}


class RandomOperations:
    """Those of a trace that are replaced; ask with ``in``.

    Args:
        trace: of a model.
        unseeded: stands for the seeds of operations without; the same on all processes.
    """

    def __init__(self, trace: Trace, unseeded: int) -> None:
        self._unseeded = unseeded
        ops = [op for op in trace.operations if op.type in _KINDS or op.type == "RandomUniformInt"]
        self._places = {op: place for place, op in enumerate(ops)}

    def __contains__(self, op: Any) -> bool:
        return op in self._places

    def draw(self, op: Any, operands: Sequence[Any], key: Any) -> Any:
        """Adds what stands for an operation to the present graph.

        Args:
            op: of the trace.
            operands: its inputs in the present graph.
            key: int64 tensor of shape [2] that is another one for each step and microbatch.
        """
        seeds = (op.get_attr("seed"), op.get_attr("seed2"))
        word = f"{seeds}" if any(seeds) else f"{self._unseeded} {self._places[op]}"
        own = zlib.crc32(word.encode())
        seed = tf.bitwise.bitwise_xor(key, tf.constant([own, own << 31], tf.int64))
        if op.type == "RandomUniformInt":
            shape, least, bound = operands
            return tf.random.stateless_uniform(shape, seed, least, bound, dtype=least.dtype)
        return _KINDS[op.type](operands[0], seed, dtype=op.outputs[0].dtype)
