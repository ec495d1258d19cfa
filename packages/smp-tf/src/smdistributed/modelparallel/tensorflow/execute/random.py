"""Random operations with numbers that depend on the step and the microbatch, not on the process.

TensorFlow's stateful random operations count how often they ran, each kernel for itself. A model
that is spread over processes and called once a microbatch would then draw other numbers for each
way to cut it. In a program they are replaced by stateless ones, keyed by the seeds of the operation
(or its place in the model), the step and the microbatch; in loops by the turn as well. Functions
that loops, branches and calls run get the key as one argument more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import functions, graphs

Draw = Callable[[Any, Sequence[Any], Any], Any]
_Place = tuple[int, ...]
#: TensorFlow's seeds are 32 bits with a sign.
_SEEDS = 2**31 - 1


def _same_shape(kind: Callable[..., Any]) -> Draw:
    return lambda op, operands, seed: kind(operands[0], seed, dtype=op.outputs[0].dtype)


def _integers(op: Any, operands: Sequence[Any], seed: Any) -> Any:
    shape, least, bound = operands
    return tf.random.stateless_uniform(shape, seed, least, bound, dtype=least.dtype)


def _gamma(op: Any, operands: Sequence[Any], seed: Any) -> Any:
    shape, alpha = operands
    whole = tf.concat([tf.cast(shape, tf.int32), tf.shape(alpha)], 0)
    return tf.random.stateless_gamma(whole, seed, alpha, dtype=alpha.dtype)


def _poisson(op: Any, operands: Sequence[Any], seed: Any) -> Any:
    shape, rate = operands
    whole = tf.concat([tf.cast(shape, tf.int32), tf.shape(rate)], 0)
    return tf.random.stateless_poisson(whole, seed, rate, dtype=op.outputs[0].dtype)


def _categories(op: Any, operands: Sequence[Any], seed: Any) -> Any:
    logits, count = operands
    return tf.random.stateless_categorical(logits, count, seed, dtype=op.outputs[0].dtype)


def _shuffled(op: Any, operands: Sequence[Any], seed: Any) -> Any:
    return tf.random.experimental.stateless_shuffle(operands[0], seed)


#: What stands for an operation of each type.
_DRAWS: dict[str, Draw] = {
    "RandomUniform": _same_shape(tf.random.stateless_uniform),
    "RandomStandardNormal": _same_shape(tf.random.stateless_normal),
    "TruncatedNormal": _same_shape(tf.random.stateless_truncated_normal),
    "RandomUniformInt": _integers,
    "RandomGamma": _gamma,
    "RandomPoissonV2": _poisson,
    "Multinomial": _categories,
    "RandomShuffle": _shuffled,
}


def _is_random(definition: Any) -> bool:
    """Tells whether an operation draws from a state of its kernel, by its definition."""
    attr = definition.attr
    if "seed" not in attr or "seed2" not in attr:
        return False
    # What asks for no randomness: a pooling that is told so, a recurrence without dropout.
    is_off = "deterministic" in attr and attr["deterministic"].b
    return not is_off and not ("dropout" in attr and attr["dropout"].f == 0.0)


def give_seeds(operations: Iterable[Any], seed: int, step: str) -> None:
    """Lets random operations of a step's body draw the same in all processes of a pipeline.

    All of them run the body; those without a seed would draw other numbers in each.

    Args:
        operations: of the body, in a graph under construction.
        seed: for those without; the same in the processes of a pipeline.
        step: name of the step function.

    Raises:
        UnsupportedError: one is inside a function, which cannot be changed any more.
    """
    unseeded = 0
    for op in operations:
        if _is_unseeded(op.node_def):
            unseeded += 1
            graphs.set_number(op, "seed", seed % _SEEDS)
            graphs.set_number(op, "seed2", unseeded)
        stack = functions.called(op.node_def)
        while stack:
            for node in functions.nodes_of(op.graph, stack.pop()):
                if _is_unseeded(node):
                    raise UnsupportedError(
                        f"step function {step} draws random numbers ({node.op}, {node.name}) "
                        "without a seed in a loop, a branch or a tf.function, so that each process "
                        "would draw others: call tf.random.set_seed first, give the operation a "
                        "seed, or draw outside of these."
                    )
                stack += functions.called(node)


def _is_unseeded(definition: Any) -> bool:
    return _is_random(definition) and _seeds(definition) == (0, 0)


def _seeds(definition: Any) -> tuple[int, int]:
    return definition.attr["seed"].i, definition.attr["seed2"].i


class RandomOperations:
    """Those of a trace that are replaced, and those that call them; ask with ``in``.

    Args:
        graph: of the trace.
        operations: of the trace, in an order that is the same on all processes.
        unseeded: stands for the seeds of operations without; the same on all processes.
        is_alone: there is one process, which may draw whatever it likes.
        dropped: names of attributes of operations that are not for TensorFlow.

    Raises:
        UnsupportedError: an operation draws, but has no stateless form.
    """

    def __init__(
        self,
        graph: Any,
        operations: Iterable[Any],
        unseeded: int,
        is_alone: bool,
        dropped: Sequence[str],
    ) -> None:
        self._graph = graph
        self._unseeded = unseeded
        self._is_alone = is_alone
        self._dropped = dropped
        self._callers: dict[str, bool] = {}
        found = [op for op in operations if self._draws(op.node_def)]
        self._places: dict[Any, _Place] = {op: (place,) for place, op in enumerate(found)}

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, op: Any) -> bool:
        return op in self._places

    def replaced(
        self, op: Any, operands: Sequence[Any], key: Any, control_inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """Adds what stands for an operation to the graph of its operands.

        Args:
            op: of the trace.
            operands: its inputs in the other graph.
            key: int64 tensor of shape [2] that is another one for each step and microbatch.
            control_inputs: operations of the other graph.

        Returns:
            an operation that is done when it is, and its outputs.
        """
        return self._replaced(op, operands, key, control_inputs, self._places[op])

    def _draws(self, definition: Any) -> bool:
        """Tells whether an operation, or a function that it calls, draws and is replaced."""
        if _is_random(definition):
            if definition.op in _DRAWS:
                return True
            if not self._is_alone:
                raise UnsupportedError(
                    f"{definition.op} ({definition.name}) draws random numbers in a way that has "
                    "no stateless form, so that each process would draw others: draw in the step "
                    "function, and call the model with the numbers, or use tf.random.stateless_*."
                )
        return any(self._function_draws(name) for name in functions.called(definition))

    def _function_draws(self, name: str) -> bool:
        if name not in self._callers:
            nodes = functions.nodes_of(self._graph, name)
            draws = [self._draws(node) for node in nodes]  # of all, so that what is refused shows
            self._callers[name] = any(draws)
        return self._callers[name]

    def _replaced(
        self,
        op: Any,
        operands: Sequence[Any],
        key: Any,
        control_inputs: Sequence[Any],
        place: _Place,
    ) -> tuple[Any, Sequence[Any]]:
        graph = key.graph
        if op.type in _DRAWS:
            with graph.as_default():
                drawn = _DRAWS[op.type](op, operands, self._seed(op, key, place))
                drawn.set_shape(op.outputs[0].shape)
            return drawn.op, [drawn]
        if not functions.takes_more(op.node_def):
            raise UnsupportedError(
                f"{op.type} ({op.name}) calls a function that draws random numbers: draw outside "
                "of it, or use tf.random.stateless_*."
            )
        with graph.as_default():
            # Another key at each place that calls, as the same function may be called twice.
            number = tf.constant(zlib.crc32(repr(place).encode()) >> 1, tf.int64)
            own = tf.random.experimental.stateless_fold_in(key, number)
        body = functions.body_of_loop(op.node_def)
        made = {
            name: self._function(name, (*place, number), name == body)
            for number, name in enumerate(functions.called(op.node_def))
        }
        call = functions.call_with_more(
            graph, op, operands, own, control_inputs, made, self._dropped
        )
        return call, list(call.outputs[: len(op.outputs)])

    def _seed(self, op: Any, key: Any, place: _Place) -> Any:
        seeds = _seeds(op.node_def)
        word = f"{seeds}" if any(seeds) else f"{self._unseeded} {place}"
        own = zlib.crc32(word.encode())
        return tf.bitwise.bitwise_xor(key, tf.constant([own, own << 31], tf.int64))

    def _function(self, name: str, place: _Place, is_body: bool) -> Any:
        """Returns a function anew, which takes a key as its last argument.

        Args:
            name: of the function.
            place: of it in the model.
            is_body: of a loop: it returns the key of the next turn as well.
        """
        source = functions.graph_of(self._graph, name)
        graph = graphs.new_graph("random")
        graphs.take_functions(graph, self._graph)
        placeholders = [graphs.placeholder(graph, each) for each in source.inputs]
        with graph.as_default():
            key = tf.compat.v1.placeholder(tf.int64, [2])
        copies = {id(old): new for old, new in zip(source.inputs, placeholders, strict=True)}
        pairs = zip(source.inputs, placeholders, strict=True)
        copied: dict[Any, Any] = {old.op: new.op for old, new in pairs}
        taken = set(copied)
        for number, op in enumerate(source.get_operations()):
            if op in taken:
                continue
            operands = [copies[id(each)] for each in op.inputs]
            waits = [copied[each] for each in op.control_inputs]
            if self._draws(op.node_def):
                copied[op], results = self._replaced(op, operands, key, waits, (*place, number))
            else:
                copied[op] = graphs.copy_operation(graph, op, operands, waits, self._dropped)
                results = copied[op].outputs
            for old, new in zip(op.outputs, results, strict=True):
                copies[id(old)] = new
        outputs = [copies[id(each)] for each in source.outputs]
        if is_body:
            with graph.as_default():
                outputs.append(key + tf.constant([0, 1], tf.int64))
        always = [copied[each] for each in source.control_outputs]
        attrs = functions.attributes_of(self._graph, name)
        return graphs.function_of(graph, [*placeholders, key], outputs, always, attrs)
