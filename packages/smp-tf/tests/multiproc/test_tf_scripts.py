"""Scripts as users of Keras write them give the numbers of one process."""

from __future__ import annotations

import pytest
import tf_scripts
from tf_beside import assert_same
from tf_worlds import TWO, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize(("kind", "way"), tf_scripts.ALL, ids=map("-".join, tf_scripts.ALL))
def test_a_script_trains_as_in_one_process(worlds: Worlds, kind: str, way: str) -> None:
    world = TWO_BY_HAND if kind == "subclassed" else TWO
    assert_same(worlds, tf_scripts.train, kind, way, world=world)
