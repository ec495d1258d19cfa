"""What is put into containers, and taken out again."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from smdistributed.modelparallel.torch.state.growth import Growth


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_what_is_the_same_as_what_was_there_is_taken_out_alone(kind: Any) -> None:
    log = kind([2, 3, 2])
    before = list(log)
    log.append(2)
    growth = Growth.of("log", log, before, list(log))
    log.appendleft(4) if kind is collections.deque else log.insert(0, 4)
    growth.remove()
    assert list(log) == [4, 2, 3, 2]
