"""Blocks that ``auto=True`` must not split as they are, or not any more: never silently wrong."""

from __future__ import annotations

import auto_unseen
import pytest
from test_tensor_parallel import WORLDS
from world import run

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

#: What stays a group, and computes the same.
EXACT = {f"inner: {name}" for name in auto_unseen.HARMLESS} | {
    *("later: another activation", "later: gradients of hooks", "later: rate"),
    "last: clamp of large inputs",
}


def try_all() -> dict[str, str]:
    return {name: auto_unseen.outcome(name) for name in auto_unseen.CASES}


def test_nothing_is_silently_wrong(worlds: Worlds) -> None:
    for found in run(worlds, WORLDS["tp2"], try_all):
        assert not {name: each for name, each in found.items() if each.startswith("wrong")}
        assert {name for name, each in found.items() if each == "exact"} == EXACT
        # What a script does later is refused, and nothing else is.
        refused = {name for name, each in found.items() if each.startswith("refused")}
        assert refused == {name for name in found if name.startswith("later")} - EXACT
