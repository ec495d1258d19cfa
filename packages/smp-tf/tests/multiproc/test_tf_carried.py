"""Numbers of one partition that a script keeps for later are those of one process then."""

from __future__ import annotations

import pytest
import tf_carried
from tf_beside import assert_same
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

#: Read by a body, and by a call of a model, of a number that another process has.
FEW = {
    ("gradient 0", "variable", "loss", "after"),
    ("weight 1", "row", "first half", "after"),
}


@pytest.mark.parametrize(
    ("origin", "keep", "reader", "when"),
    [
        pytest.param(*each, id="-".join(each), marks=() if each in FEW else pytest.mark.slow)
        for each in tf_carried.ALL
    ],
)
def test_numbers_that_are_kept(
    worlds: Worlds, origin: str, keep: str, reader: str, when: str
) -> None:
    assert_same(worlds, tf_carried.train, origin, keep, reader, when, world=TWO_BY_HAND)
