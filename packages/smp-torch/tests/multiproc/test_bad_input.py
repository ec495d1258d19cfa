"""Bad input to the API and to checkpoints: a clear error on every rank, and no harm to the job.

``bad_inputs`` is the population. Every run tries a part that goes through it in strides.
"""

from __future__ import annotations

import re
from pathlib import Path

import bad_inputs
import pytest
from world import pipeline, run

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WORLD = pipeline(2, 2, launcher="fork")
STRIDE = 4
PARTS = [pytest.param(part, marks=pytest.mark.slow if part else ()) for part in range(STRIDE)]
#: Damages that say what the layout of a checkpoint may say: that it lists no module, or no tensor.
HARMLESS = ("layout partition 6", "layout tensors 6")


def test_the_population_is_large_enough() -> None:
    assert len(bad_inputs.API) >= 120
    assert len(bad_inputs.damages()) >= 100


def judge(ranks: tuple[dict[str, str], ...]) -> dict[str, list[str]]:
    """Returns what is not the same error on every rank."""
    return {
        name: [each[name] for each in ranks]
        for name in ranks[0]
        if any(not each[name].startswith("refused") for each in ranks)
        or len({re.sub(r"rank \d", "rank", each[name]) for each in ranks}) > 1
    }


@pytest.mark.parametrize("part", PARTS)
def test_the_api_refuses(worlds: Worlds, part: int) -> None:
    names = list(bad_inputs.API)[part::STRIDE]
    assert judge(run(worlds, WORLD, bad_inputs.try_api, names)) == {}


@pytest.mark.parametrize("part", PARTS)
def test_damaged_checkpoints_are_refused(worlds: Worlds, part: int, tmp_path: Path) -> None:
    run(worlds, WORLD, bad_inputs.saved, str(tmp_path))
    assert (
        run(worlds, WORLD, bad_inputs.try_damages, str(tmp_path), ["intact"])
        == ({"intact": "accepted"},) * 2
    )
    names = [name for name in bad_inputs.damages()[part::STRIDE] if name not in HARMLESS]
    assert judge(run(worlds, WORLD, bad_inputs.try_damages, str(tmp_path), names)) == {}
