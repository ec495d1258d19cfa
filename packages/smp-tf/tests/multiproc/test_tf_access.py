"""What a script reads or writes is of the whole model, wherever its variables are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tf_access
from tf_beside import on_side
from tf_worlds import PLAIN, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

FEW = {("variables", "between"), ("slots", "function")}


def _differences(found: Any, expected: Any, name: str = "") -> Iterator[str]:
    """Yields what is neither refused nor as it is without the library."""
    if isinstance(found, str) and found.startswith("refused"):
        yield f"{name} {found}"
    elif isinstance(expected, dict):
        for key in expected:
            yield from _differences(found[key], expected[key], f"{name}/{key}")
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{name} has {len(found)}, not {len(expected)}"
        for place, pair in enumerate(zip(found, expected, strict=False)):
            yield from _differences(*pair, f"{name}/{place}")
    elif isinstance(expected, str):
        if found != expected:
            yield f"{name} is {found}, not {expected}"
    elif not np.allclose(found, expected, 1e-4, 1e-5):
        yield f"{name} is {found}, not {expected}"


@pytest.mark.parametrize(
    ("place", "moment"),
    [
        pytest.param(*each, marks=() if each in FEW else pytest.mark.slow)
        for each in tf_access.CELLS
    ],
)
def test_values_are_those_of_the_whole_model(worlds: Worlds, place: str, moment: str) -> None:
    (expected,) = worlds.run(PLAIN, on_side, tf_access.cell, True, place, moment)
    for found in worlds.run(TWO_BY_HAND, on_side, tf_access.cell, False, place, moment):
        differences = list(_differences(found, expected))
        refused = {each for each in differences if " refused: " in each}
        assert not set(differences) - refused
        names = {each.split(" refused: ")[0].rsplit("/", 1)[-1] for each in refused}
        assert names == ({"map"} if moment == "function" else set())
