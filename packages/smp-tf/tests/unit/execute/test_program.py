"""What a process executes of a plan: one function a pass, and how it is run."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from traces import dense, placed, traced

from smdistributed.modelparallel.tensorflow.compat.executors import SINGLE_THREADED, USUAL
from smdistributed.modelparallel.tensorflow.execute.program import LocalPrograms
from smdistributed.modelparallel.tensorflow.planning.segments import cut


def _looped(x: Any) -> Any:
    return tf.while_loop(lambda x: tf.norm(x) > 1.0, lambda x: [0.5 * x], [x])[0]


@pytest.mark.parametrize(
    ("between", "has_one_core", "expected"),
    [
        (tf.tanh, True, SINGLE_THREADED),
        (tf.tanh, False, USUAL),
        (_looped, True, USUAL),
    ],
)
def test_passes_run_in_one_thread_where_that_gains(
    between: Any, has_one_core: bool, expected: str
) -> None:
    layer = dense("a")
    one = traced(lambda x: layer(between(x)), layer)
    plan = cut(one, *placed(one, 1), 1)
    local = LocalPrograms(plan, 0, 0, is_alone=True, has_one_core=has_one_core)
    forward, _ = local.programs
    assert forward.executor == expected
