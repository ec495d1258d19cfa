"""What the processes of a pipeline draw without seeds is what the first of them draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import processes
from smdistributed.modelparallel.tensorflow.runtime.drawing import draw_alike


class Pipeline:
    """Stands for the communicators of processes that come to an exchange one after the other."""

    def __init__(self) -> None:
        self.first: Any = None

    def allgather(self, own: Any, group: CommGroup) -> list[Any]:
        assert group is CommGroup.PP_GROUP
        self.first = self.first or own
        return [self.first, own]


def drawn() -> tuple[Any, ...]:
    order = tf.random.shuffle(tf.range(100)).numpy().tolist()
    return random.random(), float(np.random.rand()), order


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    states, seed = (random.getstate(), np.random.get_state()), processes.seed()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    tf.random.set_seed(seed)


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_processes_draw_as_the_first_does(seed: int | None) -> None:
    pipeline: Any = Pipeline()
    found = []
    for _ in range(2):
        random.seed()
        np.random.seed()
        tf.random.set_seed(seed)
        draw_alike(pipeline)
        found.append(drawn())
    assert found[0] == found[1]
    assert seed is None or processes.seed() == seed
