"""Heads that come together with what is whole, in slices that ``auto=True`` finds."""

from __future__ import annotations

import itertools

import heads_and_whole
import pytest
from heads_and_whole import Member
from test_auto_blocks import verdicts
from test_tensor_parallel import WORLDS
from world import quick, run

from smdistributed.modelparallel.common.testing import Worlds

#: One of each way to come together, with gradients on all sides.
CHOSEN: list[Member] = [
    ("given", "pre", "apart", "softmax", "numbers", "all", "given"),
    ("folded", "post", "one module", "softmax", "attributes", "none", "causal"),
    ("wide norm", "pre", "apart", "kernel", "attributes", "all", "none"),
    ("one map", "post", "apart", "softmax", "attributes", "all", "causal"),
    ("latent", "pre", "one module", "kernel", "numbers", "none", "given"),
]

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "world", ["tp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp4", "pp2-tp2"))]
)
def test_heads_that_meet_what_is_whole_give_the_numbers_of_one_process(
    worlds: Worlds, world: str
) -> None:
    found = verdicts(worlds, CHOSEN, world, 4 if world == "tp4" else 2, heads_and_whole.outcomes)
    wanted = [
        "blocks.0, blocks.1"
        if member[2] == "one module"
        else "blocks.0.attention, blocks.0.inner, blocks.1.attention, blocks.1.inner"
        for member in CHOSEN
    ]
    assert found == [f"exact: {each}" for each in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("world", ["tp2", "tp4", "pp2-tp2"])
def test_sampled_heads_are_never_wrong(worlds: Worlds, world: str) -> None:
    chosen, size = heads_and_whole.sample(60, 1), 4 if world == "tp4" else 2
    found = verdicts(worlds, chosen, world, size, heads_and_whole.outcomes)
    assert all(each.startswith("exact") for each in found), found


@pytest.mark.parametrize(
    ("case", "number"),
    quick(
        list(itertools.product(("checkpointed", "captured", "compiled"), range(len(CHOSEN)))),
        [("checkpointed", 2), ("captured", 1), ("compiled", 0)],
    ),
)
def test_heads(worlds: Worlds, case: str, number: int) -> None:
    run(worlds, WORLDS["tp2"], getattr(heads_and_whole, case), CHOSEN[number], timeout=300)
