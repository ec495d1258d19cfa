"""Says whether the installed TensorFlow still has what is used of it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import graphs
from smdistributed.modelparallel.tensorflow.compat.gradients import unrecorded, with_gradient
from smdistributed.modelparallel.tensorflow.compat.variables import empty_variable, free


def self_test() -> None:
    """Uses graphs, gradients and variables once.

    Raises:
        Exception: the installed TensorFlow lacks something, or it works differently.
    """
    made: list[Any] = []

    def creator(next_creator: Any, **arguments: Any) -> Any:
        with tf.Graph().as_default():
            like = tf.convert_to_tensor(arguments["initial_value"]())
        made.append(empty_variable(like, arguments))
        return made[-1]

    def body(x: Any) -> list[Any]:
        with graphs.attributes({"_smp_number": 3, "_smp_word": "a"}):
            with tf.init_scope():
                made or tf.Variable(lambda: tf.ones([2]))
            return [x * made[0]]

    graph = graphs.trace("self_test", body, [tf.TensorSpec([2], tf.float32)], creator)
    (product,) = (operation for operation in graph.get_operations() if operation.type == "Mul")
    assert graphs.attribute(product, "_smp_number") == 3
    assert graphs.attribute(product, "_smp_word") == "a"
    ((handle, inside),) = graphs.captures(graph)
    assert handle is made[0].handle
    made[0].assign([2.0, 3.0])

    copy = graphs.new_graph("copy")
    inputs = [graphs.placeholder(copy, graph.inputs[0]), graphs.placeholder(copy, inside)]
    copies = {id(graph.inputs[0]): inputs[0], id(inside): inputs[1]}
    for operation in graph.get_operations():
        if operation.type in ("ReadVariableOp", "Mul"):
            copied = graphs.copy_operation(
                copy, operation, [copies[id(t)] for t in operation.inputs], [], ("_smp_number",)
            )
            copies[id(operation.outputs[0])] = copied.outputs[0]
    assert graphs.attribute(copied, "_smp_number") is None
    function = graphs.function_of(copy, inputs, copied.outputs, [copied])

    def run(x: Any) -> Any:
        variable = made[0]
        with tf.GradientTape() as tape:
            read = variable.read_value()
            with unrecorded():
                graph = tf.compat.v1.get_default_graph()
                operation = graphs.call(function, [x, graphs.capture(graph, handle)])
                graphs.keep(graph, [operation])
            result, *_ = with_gradient(
                [operation.outputs[0], read], lambda dy, _: [None, 5.0 * dy], "SmpSelfTest"
            )
        return result, tape.gradient(result, variable)

    product, gradient = tf.function(run, autograph=False)(tf.constant([1.0, 1.0]))
    assert product.numpy().tolist() == [2.0, 3.0]
    assert gradient.numpy().tolist() == [5.0, 5.0]
    free(made[0])
