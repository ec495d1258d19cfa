"""A placed trace falls into segments, with the transfers between them and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from traces import dense, on, placed, traced, variable

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.tensorflow.planning.segments import Plan, cut


def _plan(call: Callable[[Any], Any], *layers: Any, num_partitions: int = 2) -> Plan:
    one = traced(call, *layers)
    found, homes = placed(one, num_partitions)
    return cut(one, found, homes, num_partitions)


def _chain(layers: list[Any], partitions: list[int]) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        for layer, partition in zip(layers, partitions, strict=True):
            with on(partition):
                x = tf.tanh(layer(x))
        return x

    return call


def _ways(plan: Plan, phase: Kind) -> list[tuple[str, int, int]]:
    """Returns what goes where in a phase: the operation that makes it, from, to."""
    return sorted(
        (each.tensor.op.type, each.source, each.target)
        for each in plan.transfers
        if each.phase is phase
    )


def test_a_chain_has_a_segment_on_each_partition_and_sends_to_the_next() -> None:
    layers = [dense("a"), dense("b")]
    plan = _plan(_chain(layers, [0, 1]), *layers)
    assert plan.partitions == [0, 1]
    # The activation to the second partition; its result, the library's copy, to the first.
    assert _ways(plan, Kind.FORWARD) == [("Identity", 1, 0), ("Tanh", 0, 1)]
    (gradient,) = _ways(plan, Kind.BACKWARD)
    assert gradient[1:] == (1, 0)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert all(plan.passes[kind, segment] for segment in (0, 1))


def test_a_partition_that_is_visited_twice_has_two_segments() -> None:
    layers = [dense(name) for name in "abc"]
    plan = _plan(_chain(layers, [0, 1, 0]), *layers)
    assert plan.partitions == [0, 1, 0]
    backward = [plan.pass_of[op][1] for op in plan.trace.operations if op in plan.pass_of]
    assert set(backward) == {0, 1, 2}


def test_what_nothing_separates_is_one_segment() -> None:
    layers = [dense(name) for name in "abc"]

    def call(x: Any) -> Any:
        with on(0):
            x = tf.tanh(layers[0](x))
        with on(1):
            y = tf.tanh(layers[1](x))
        with on(0):
            z = tf.tanh(layers[2](x))  # does not wait for the second partition
        return y, z

    assert _plan(call, *layers).partitions == [0, 1]


def test_every_operation_is_in_the_pass_of_its_kind_after_what_it_reads() -> None:
    layers = [dense(name) for name in "abcd"]
    plan = _plan(_chain(layers, [0, 1, 0, 1]), *layers)
    trace = plan.trace
    for op, (kind, segment) in plan.pass_of.items():
        assert (kind is Kind.FORWARD) == (op in trace.forward)
        for tensor in op.inputs:
            if tensor.op not in plan.pass_of:
                continue
            other_kind, other = plan.pass_of[tensor.op]
            if other_kind is kind:  # forward passes go up, backward passes down
                assert other <= segment if kind is Kind.FORWARD else other >= segment
            else:
                assert kind is Kind.BACKWARD


def test_gradients_of_variables_are_made_where_these_live() -> None:
    layers = [dense(name) for name in "abc"]
    plan = _plan(_chain(layers, [1, 0, 1]), *layers)
    homes = dict(zip(map(id, map(variable, layers)), [1, 0, 1], strict=True))
    pairs = zip(plan.trace.variables, plan.trace.variable_gradients, strict=True)
    for one, gradient in pairs:
        _, segment = plan.pass_of[gradient.op]
        assert plan.partitions[segment] == homes[id(one)]


def test_what_only_gradients_of_others_need_goes_in_the_backward_pass() -> None:
    layer = dense("a")

    def call(x: Any) -> Any:
        with on(0):
            scale = tf.tanh(layer(x))

            @tf.custom_gradient
            def scaled(y: Any) -> Any:
                return tf.identity(y), lambda dy: dy * scale

        with on(1):
            return tf.sigmoid(scaled(tf.sin(layer(x))))

    plan = _plan(call, layer)
    late = [each for each in plan.transfers if each.phase is Kind.BACKWARD]
    assert any(each.made_in[0] is Kind.FORWARD for each in late)


def test_plans_of_one_model_have_one_digest_and_those_of_others_another() -> None:
    layers = [dense(name) for name in "ab"]
    plans = [_plan(_chain(layers, cut), *layers) for cut in ([0, 1], [0, 1], [1, 0])]
    digests = [plan.digest() for plan in plans]
    assert digests[0] == digests[1] != digests[2]


def test_four_partitions() -> None:
    layers = [dense(name) for name in "abcd"]
    plan = _plan(_chain(layers, [0, 1, 2, 3]), *layers, num_partitions=4)
    assert plan.partitions == [0, 1, 2, 3]
    activations = [way for way in _ways(plan, Kind.FORWARD) if way[0] == "Tanh"]
    assert activations == [("Tanh", 0, 1), ("Tanh", 1, 2), ("Tanh", 2, 3)]
    # The result goes to everyone, once each.
    results = [way for way in _ways(plan, Kind.FORWARD) if way[0] == "Identity"]
    assert results == [("Identity", 3, each) for each in (0, 1, 2)]
