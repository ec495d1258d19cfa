"""What the body of a step does to the state of its model between calls is done in its turn."""

from __future__ import annotations

import pytest
import tf_meetings
from tf_beside import assert_same
from tf_worlds import ONE, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

#: Each failed once, where one process has all of the model, and where another one has the state.
FEW = {(1, (0, "leaves", "ever")), (2, (0, "writes", "between"))}


@pytest.mark.parametrize(
    ("world", "way"),
    [
        pytest.param(
            world,
            way,
            id=f"pp{world.num_ranks} {' '.join(map(str, way))}",
            marks=() if (world.num_ranks, way) in FEW else pytest.mark.slow,
        )
        for world in (ONE, TWO_BY_HAND)
        for way in tf_meetings.WAYS
    ],
)
def test_each_microbatch_finds_what_was_left(
    worlds: Worlds, world: World, way: tuple[int, str, str]
) -> None:
    assert_same(worlds, tf_meetings.meeting, *way, world=world)
