"""After many steps a process holds what it held after the first ones."""

from __future__ import annotations

import pytest
import tf_long_runs
from tf_worlds import TWO, TWO_REPLICAS

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WORLDS = {"pipeline": TWO, "replicas": TWO_REPLICAS}


@pytest.mark.parametrize(
    ("world", "num_first", "num_steps"),
    [
        pytest.param(TWO, 20, 80, id="pipeline-20-80"),
        *(
            pytest.param(world, *steps, id=f"{name}-{steps[1]}", marks=pytest.mark.slow)
            for name, world in WORLDS.items()
            for steps in ((20, 80), (100, 1000))
            if (name, steps) != ("pipeline", (20, 80))
        ),
    ],
)
def test_a_long_run_holds_no_more_than_a_short_one(
    worlds: Worlds, world: World, num_first: int, num_steps: int
) -> None:
    worlds.run(world, tf_long_runs.train, num_first, num_steps)
