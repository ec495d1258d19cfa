"""Models that use each other's variables train as in one process."""

from __future__ import annotations

import pytest
import tf_shared
from tf_beside import assert_same, with_library
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.errors import NotPartitionedError
from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

#: What is used elsewhere than where it is: first there, and by the one that has it first.
FEW = {("kernel", 0, 1, "second", False), ("layer", 1, 0, "both", True)}


@pytest.mark.parametrize(
    ("kind", "has", "uses", "begins", "trains_both"),
    [pytest.param(*each, marks=() if each in FEW else pytest.mark.slow) for each in tf_shared.ALL],
)
def test_they_train(
    worlds: Worlds, kind: str, has: int, uses: int, begins: str, trains_both: bool
) -> None:
    case = kind, has, uses, begins, trains_both
    assert_same(worlds, tf_shared.train, *case, world=TWO_BY_HAND)


def _refuse() -> None:
    with pytest.raises(NotPartitionedError, match="no step function has placed"):
        tf_shared.train(with_library(), "layer", 0, 1, "second", True)


@pytest.mark.slow
def test_what_is_not_placed_is_not_updated(worlds: Worlds) -> None:
    worlds.run(TWO_BY_HAND, _refuse)
