"""One thread runs what ends in it, and nothing that would wait there for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import graphs
from smdistributed.modelparallel.tensorflow.compat.executors import (
    SINGLE_THREADED,
    USUAL,
    executor_of,
)


def _executor(body: Callable[[Any], Any]) -> str:
    spec = tf.TensorSpec([2], tf.float32)
    concrete = tf.function(body, autograph=False).get_concrete_function(spec)
    return executor_of(concrete.graph.get_operations())


def _at(device: str) -> Callable[[Any], Any]:
    def body(x: Any) -> Any:
        with tf.device(device):
            return x * 2.0

    return body


def _while(x: Any) -> Any:
    return tf.while_loop(lambda x: x[0] < 3.0, lambda x: [x + 1.0], [x])


def test_variables_and_products_are_for_one_thread() -> None:
    kernel, table = tf.Variable(tf.ones([2, 2])), tf.Variable(tf.ones([3, 2]))

    def body(x: Any) -> Any:
        table.scatter_nd_update([[1]], [x])
        table.scatter_add(tf.IndexedSlices([x], [0]))
        kernel.assign_add(kernel * 0.5)
        x = tf.random.stateless_normal([2], [1, 2]) + tf.debugging.check_numerics(x, "x")
        return tf.linalg.matvec(kernel, x) + tf.gather(table, [1])[0]

    assert _executor(body) == SINGLE_THREADED
    for device in ("/CPU:0", "/job:smp/replica:0/task:1/device:CPU:0"):
        assert _executor(_at(device)) == SINGLE_THREADED


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_while, id="loop"),
        pytest.param(lambda x: tf.cond(x[0] > 0.0, lambda: x, lambda: -x), id="branch"),
        pytest.param(lambda x: tf.function(tf.abs)(x), id="call"),
        pytest.param(lambda x: tf.py_function(tf.abs, [x], tf.float32), id="Python"),
        pytest.param(lambda x: tf.queue.FIFOQueue(1, [tf.float32]).dequeue(), id="queue"),
        pytest.param(_at("/GPU:0"), id="another kind of device"),
        pytest.param(_at("/CPU:1"), id="another device of the kind"),
    ],
)
def test_what_could_wait_is_for_the_usual_one(body: Callable[[Any], Any]) -> None:
    assert _executor(body) == USUAL


def test_loops_of_the_old_kind_are_for_the_usual_one() -> None:
    graph = graphs.new_graph("old")
    with graph.as_default():
        tf.raw_ops.Switch(data=tf.ones([2]), pred=tf.constant(True))
    assert executor_of(graph.get_operations()) == USUAL
