"""A rank that reads the value of a variable alone gets it, without the others at that line."""

from __future__ import annotations

import pytest
import tf_alone
from tf_beside import assert_same
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


@pytest.mark.parametrize("kind", tf_alone.READS)
def test_one_rank_reads_alone(worlds: Worlds, kind: str) -> None:
    assert_same(worlds, tf_alone.alone, kind, world=TWO_BY_HAND)
