"""State that operations read and write is that of microbatches one after the other."""

from __future__ import annotations

import pytest
import tf_effects
from tf_beside import assert_same
from tf_worlds import TWO, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    "name",
    [
        # Loops that leave nothing are in test_tf_equality.
        pytest.param("loops", marks=pytest.mark.slow),
        "repeated_norm",
        "read_then_written",
        "written_in_the_body",
        "updated_in_the_body",
        "without_variables",
    ],
)
def test_microbatches_find_what_those_before_left(worlds: Worlds, name: str) -> None:
    assert_same(worlds, getattr(tf_effects, name), world=TWO_BY_HAND)


@pytest.mark.slow
def test_loops_are_cut_automatically(worlds: Worlds) -> None:
    assert_same(worlds, tf_effects.loops, world=TWO)
