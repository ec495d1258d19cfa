"""Layers that the first call of a model leaves out are those of one process when they are used."""

from __future__ import annotations

import pytest
import tf_later
from tf_beside import assert_same
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

#: What nothing but the layer's own call reads.
FEW = {("seeds", 1, "an evaluation")}


@pytest.mark.parametrize(
    ("kept", "half", "first"),
    [pytest.param(*each, marks=() if each in FEW else pytest.mark.slow) for each in tf_later.ALL],
)
def test_layers_that_are_used_later(worlds: Worlds, kept: str, half: int, first: str) -> None:
    assert_same(worlds, tf_later.train, kept, half, first, world=TWO_BY_HAND)
