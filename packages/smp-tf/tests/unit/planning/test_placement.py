"""Operations and variables go where they are wanted, and together where they must be."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from traces import WIDTH, dense, on, placed, traced, variable

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.tensorflow.planning.placement import (
    Placement,
    check_index,
    place,
)


def _partitions_of(found: dict[Any, int], kind: str) -> list[int]:
    """Returns the partitions of the forward operations of a type, in order."""
    return [partition for op, partition in found.items() if op.type == kind]


def test_operations_are_where_they_are_asked_for_and_variables_with_them() -> None:
    first, second = dense("first"), dense("second")

    def call(x: Any) -> Any:
        with on(1):
            x = tf.tanh(first(x))
        with on(0):
            return tf.sigmoid(second(x))

    found, homes = placed(traced(call, first, second))
    assert _partitions_of(found, "MatMul") == [1, 0]
    assert _partitions_of(found, "Tanh") == [1]
    assert _partitions_of(found, "Sigmoid") == [0]
    assert homes == {id(variable(first)): 1, id(variable(second)): 0}


def test_a_variable_is_in_one_place_and_its_readers_with_it() -> None:
    shared = dense("shared")

    def call(x: Any) -> Any:
        with on(1):
            x = tf.tanh(shared(x))
        with on(0):
            return tf.sigmoid(shared(x))

    found, homes = placed(traced(call, shared))
    assert homes == {id(variable(shared)): 1}
    reads = {partition for op, partition in found.items() if op.type == "ReadVariableOp"}
    assert reads == {1}
    assert _partitions_of(found, "Sigmoid") == [0]


def test_what_passes_a_list_on_is_together() -> None:
    def call(x: Any) -> Any:
        with on(0):
            written = tf.TensorArray(tf.float32, 1, element_shape=x.shape).write(0, x)
        with on(1):
            return tf.tanh(written.read(0))

    found, _ = placed(traced(call))
    lists = {partition for op, partition in found.items() if op.type.startswith("TensorList")}
    assert lists == {0}
    assert _partitions_of(found, "Tanh") == [1]


def test_what_nobody_asked_for_follows_what_it_reads() -> None:
    def call(x: Any) -> Any:
        with on(1):
            return tf.tanh(x)

    one = traced(call)
    found, _ = placed(one)
    assert found[one.outputs[0].op] == 1  # the library's own copy of the result


def test_only_the_forward_pass_is_placed_and_constants_are_everywhere() -> None:
    layer = dense("layer")
    one = traced(lambda x: layer(x) * 3.0, layer)
    found, _ = placed(one)
    assert set(found) <= one.forward
    assert not any(op.type == "Const" for op in found)


@pytest.mark.parametrize(
    ("optimize", "expected"),
    [
        ("memory", [0, 1, 1, 1]),  # the first layer has half of all bytes
        ("speed", [0, 0, 1, 1]),  # each layer has one variable
    ],
)
def test_the_library_cuts_between_layers(optimize: str, expected: list[int]) -> None:
    layers = [dense("wide", 12), dense("a"), dense("b"), dense("c")]

    def call(x: Any) -> Any:
        x = layers[0](x)[:, :4]
        for layer in layers[1:]:
            x = layer(x)
        return x

    found, homes = placed(traced(call, *layers), is_automatic=True, optimize=optimize)
    assert [homes[id(variable(layer))] for layer in layers] == expected
    assert _partitions_of(found, "MatMul") == expected


def test_a_cut_by_hand_is_told_by_layers() -> None:
    layers = [dense(name, WIDTH) for name in ("a", "b", "c")]

    def call(x: Any) -> Any:
        with on(0):
            x = layers[0](x)
        with on(1):
            return layers[2](layers[1](x))

    placement = Placement()
    place(
        traced(call, *layers),
        placement,
        num_partitions=2,
        is_automatic=False,
        default_partition=0,
        optimize="memory",
    )
    assert placement.assignment is not None
    assert list(placement.assignment.units.values()) == [0, 1, 1]
    assert placement.assignment.memory_shares == (1 / 3, 2 / 3)
    assert placement.assignment.containers.keys() == {""}


@pytest.mark.parametrize("index", [-1, 2])
def test_partitions_that_do_not_exist_are_refused(index: int) -> None:
    check_index(1, 2)
    with pytest.raises(PartitionError, match=f"from 0 to 1; smp.partition received {index}"):
        check_index(index, 2)


@pytest.mark.parametrize("index", [True, "0", 1.0])
def test_partitions_are_numbers(index: Any) -> None:
    with pytest.raises(TypeError, match="takes the index of a partition"):
        check_index(index, 2)
