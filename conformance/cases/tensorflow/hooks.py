"""TensorFlow: ``register_post_partition_hook``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from conformance.registry import tensorflow_case

ROW = "smp.register_post_partition_hook"


def _observed(adapter: Any) -> dict[str, Any]:
    """Registers hooks, steps twice, and returns what the hooks saw."""
    smp, tf = adapter.smp, adapter.tf
    model, seen = adapter.chain(), []
    outside = tf.Variable(0.0)

    @smp.register_post_partition_hook
    def first() -> None:
        seen.append("first")
        assert tf.executing_eagerly()
        held = [variable for layer in model.chain for variable in layer.variables]
        mine = {id(variable) for variable in model.local_variables}
        assert len(mine) > 0
        assert (len(mine) < len(held)) == (smp.pp_size() > 1)
        # Nothing ran yet, and what the hook changes is what the first forward pass reads.
        assert float(outside) == 0.0
        for variable in model.local_variables:
            variable.assign(tf.zeros_like(variable))

    smp.register_post_partition_hook(lambda: seen.append("second"))

    @smp.step
    def body(x: Any) -> Any:
        outside.assign_add(1.0)
        return model(x)

    x = adapter.tensor(adapter.batch(8))
    outputs = [adapter.array(body(x).concat()) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        late = smp.register_post_partition_hook(lambda: seen.append("late"))
    body(x)
    return {
        "seen": seen,
        "is function": callable(first) and callable(late),
        "zero": all((output == 0).all() for output in outputs),
        "told": [str(each.message) for each in caught],
    }


def _check(found: dict[str, Any]) -> None:
    assert found["seen"] == ["first", "second"]
    assert found["is function"]
    assert found["zero"]
    assert any("hook" in each for each in found["told"]), found["told"]


@tensorflow_case(ROW, "common.first_call", worlds=("pipeline",))
def hooks_run_once_after_partitioning_and_before_the_first_forward_pass(adapter: Any) -> None:
    _check(_observed(adapter))


@tensorflow_case(ROW, worlds=("alone",))
def hooks_run_with_one_partition_too(adapter: Any) -> None:
    _check(_observed(adapter))


@tensorflow_case(ROW, worlds=("new",))
def hooks_are_functions(adapter: Any) -> None:
    adapter.smp.init({"pipeline_parallel_degree": 1})
    with pytest.raises(TypeError):
        adapter.smp.register_post_partition_hook("hook")
