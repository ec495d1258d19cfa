"""TensorFlow: what goes to which partition, by ``smp.partition`` and by the library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import WIDTH
from conformance.cases.tensorflow.model import run
from conformance.registry import tensorflow_case


@tensorflow_case(
    "smp.partition", "config.auto_partition", "config.default_partition", worlds=("manual",)
)
def contexts_place_what_is_made_inside(adapter: Any) -> None:
    """The default of this world is partition 1."""
    model = adapter.chain(places=(0, 1, None, 0))
    output = run(adapter, model)
    assert adapter.held(model) == [{0, 3}, {1, 2}]
    wanted = adapter.reference(adapter.batch(8)) - 0.5
    np.testing.assert_allclose(adapter.array(output.concat()), wanted, atol=1e-6)


@tensorflow_case("smp.partition", worlds=("manual",))
def the_innermost_context_wins(adapter: Any) -> None:
    smp = adapter.smp

    class Nested(type(adapter.chain())):  # type: ignore[misc]
        def call(self, inputs: Any, training: Any = None) -> Any:
            first, second, third, last = self.chain
            with smp.partition(0):
                inputs = first(inputs)
                with smp.partition(1):
                    inputs = second(inputs)
                    with smp.partition(0):
                        inputs = third(inputs)
                    return last(inputs)

    model = Nested(adapter.chain().chain)
    run(adapter, model)
    assert adapter.held(model) == [{0, 2}, {1, 3}]


_RANGE = r"(?s)(?=.*{})(?=.*\b0\b)(?=.*\b1\b)"


@tensorflow_case("smp.partition", "config.C06", worlds=("manual",))
def partitions_that_do_not_exist_are_refused(adapter: Any) -> None:
    for index in (-1, 2):
        with (
            pytest.raises(ValueError, match=_RANGE.format(index)),
            adapter.smp.partition(index),
        ):
            pass
    for index in ("1", 1.0, True, None):
        with pytest.raises(TypeError, match="an int"), adapter.smp.partition(index):
            pass


@tensorflow_case("smp.partition", "config.C06", worlds=("manual",))
def partitions_that_do_not_exist_are_refused_in_call(adapter: Any) -> None:
    for index in (-1, 2):
        with pytest.raises(ValueError, match=_RANGE.format(index)):
            run(adapter, adapter.chain(places=(0, 1, index, 0)))


@tensorflow_case("smp.partition", "config.C06", "config.auto_partition", worlds=("pipeline",))
def contexts_do_nothing_where_the_library_decides(adapter: Any) -> None:
    plain, marked = adapter.chain(), adapter.chain(places=(1, 1, 0, 0))
    run(adapter, plain)
    run(adapter, marked)
    assert adapter.held(marked) == adapter.held(plain)


@tensorflow_case("config.C06", "config.auto_partition", worlds=("alone", "pipeline"))
def contexts_of_no_partition_do_nothing_where_the_library_decides(adapter: Any) -> None:
    model = adapter.chain(places=(7, None, 1, 0))
    output = run(adapter, model)
    wanted = adapter.reference(adapter.batch(8)) - 0.5
    np.testing.assert_allclose(adapter.array(output.concat()), wanted, atol=1e-6)


def _sizes(adapter: Any, model: Any) -> list[tuple[int, int]]:
    """Returns bytes and number of the variables of each partition."""
    own = [
        math.prod(variable.shape) * 4
        for layer in model.chain
        for variable in layer.variables
        if any(variable is each for each in model.local_variables)
    ]
    found: list[tuple[int, int]] = adapter.smp.allgather((sum(own), len(own)), adapter.smp.PP_GROUP)
    return found


def _uneven(adapter: Any) -> Any:
    """Returns a chain of two large layers and eight small ones."""
    dense = adapter.tf.keras.layers.Dense
    widths = (60, *[WIDTH] * 9)
    return adapter.chain([dense(width, "tanh", name=f"d_{i}") for i, width in enumerate(widths)])


def _best(numbers: list[int]) -> int:
    """Returns the larger half of the chain that is cut best."""
    return min(max(sum(numbers[:cut]), sum(numbers[cut:])) for cut in range(1, len(numbers)))


@tensorflow_case(
    "config.optimize", "tensorflow.partitioner.0", "common.first_call", worlds=("pipeline",)
)
def memory_balances_the_bytes_of_variables(adapter: Any) -> None:
    dense = adapter.tf.keras.layers.Dense
    even = adapter.chain([dense(WIDTH, name=f"d_{i}") for i in range(8)])
    for model in (even, _uneven(adapter)):
        run(adapter, model)
        sizes = [sum(math.prod(v.shape) * 4 for v in layer.variables) for layer in model.chain]
        found = _sizes(adapter, model)
        assert sum(size for size, _ in found) == sum(sizes)
        assert max(size for size, _ in found) <= 1.1 * _best(sizes), found


@tensorflow_case("config.optimize", "tensorflow.partitioner.0", worlds=("spread",))
def speed_balances_the_number_of_variables(adapter: Any) -> None:
    model = _uneven(adapter)
    run(adapter, model)
    counts = [count for _, count in _sizes(adapter, model)]
    assert sum(counts) == 20
    # Ten layers of two variables: five on each side, or one layer away from that.
    assert abs(counts[0] - counts[1]) <= 4, counts


@tensorflow_case("config.contiguous", "tensorflow.partitioner.1", worlds=("pipeline",))
def partitions_are_connected(adapter: Any) -> None:
    """Of a chain, connected parts are intervals."""
    dense = adapter.tf.keras.layers.Dense
    widths = (5, 40, 3, 17, 17, 60, 2, 30, WIDTH)
    model = adapter.chain([dense(width, name=f"d_{i}") for i, width in enumerate(widths)])
    run(adapter, model)
    for places in adapter.held(model):
        assert places
        assert places == set(range(min(places), max(places) + 1))


@tensorflow_case("tensorflow.partitioner.1", worlds=("pipeline", "manual"))
def the_variables_of_a_layer_stay_together(adapter: Any) -> None:
    model = adapter.chain(places=(0, 1, 0, 1))
    run(adapter, model)
    own = {id(variable) for variable in model.local_variables}
    for layer in model.chain:
        here = {id(variable) in own for variable in layer.variables}
        assert len(here) == 1


@tensorflow_case("tensorflow.partitioner.1", worlds=("pipeline", "manual"))
def what_reads_one_variable_stays_together(adapter: Any) -> None:
    """The table is read at both ends of the model, and has one home."""
    smp, tf = adapter.smp, adapter.tf

    class Tied(smp.DistributedModel):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name="tied")
            self.table = tf.keras.layers.Dense(WIDTH, use_bias=False, name="table")
            self.middle = [tf.keras.layers.Dense(WIDTH, name=f"middle_{i}") for i in range(3)]

        def call(self, inputs: Any, training: Any = None) -> Any:
            with smp.partition(0):
                x = self.table(inputs)
            with smp.partition(1):
                for layer in self.middle:
                    x = layer(x)
                return tf.matmul(x, self.table.kernel, transpose_b=True)

    model = Tied()
    run(adapter, model)
    here = any(model.table.kernel is each for each in model.local_variables)
    assert sum(smp.allgather(here, smp.PP_GROUP)) == 1
