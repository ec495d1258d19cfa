"""Blocks that have attention and inner layer in one module, in slices that ``auto=True`` finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import one_module_blocks
import pytest
from one_module_blocks import MICROBATCHES, Member
from test_tensor_parallel import WORLDS
from world import quick, run, world_of

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

#: One of each way in which a plan ends, and of each kind of part.
CHOSEN: list[Member] = [
    ("pre", "sequential", "fused", "gelu", "all", "inline", "causal"),
    ("pre", "parallel", "grouped", "gated", "all", "methods", "given"),
    ("post", "sequential", "torch's", "gelu", "residual", "inline", "given"),
    ("both", "parallel, two norms", "softmax", "fused gate", "none", "functions", "none"),
    ("root mean square", "scaled", "three", "sequential", "residual", "methods", "causal"),
]


def verdicts(
    worlds: Worlds,
    chosen: Sequence[Any],
    world: str,
    size: int,
    outcomes: Callable[..., list[dict[str, Any]]] = one_module_blocks.outcomes,
) -> list[str]:
    """Returns of each whether it is exact, and in how many groups it is split, or refused."""
    one = world_of(1, {"microbatches": MICROBATCHES * size, "ddp": True})
    (wanted,) = run(worlds, one, outcomes, chosen, size, False, timeout=600)
    found, *_ = run(worlds, WORLDS[world], outcomes, chosen, size, True, timeout=600)
    return [_verdict(*each) for each in zip(found, wanted, strict=True)]


def _verdict(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    if "refused" in found:
        return f"refused: {found['refused']}"
    wrong = one_module_blocks.difference(found, wanted)
    return f"wrong: {wrong}" if wrong else f"exact: {', '.join(found['groups'])}"


@pytest.mark.parametrize(
    "world", ["tp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp4", "pp2-tp2"))]
)
def test_blocks_are_groups_and_give_the_numbers_of_one_process(worlds: Worlds, world: str) -> None:
    found = verdicts(worlds, CHOSEN, world, 4 if world == "tp4" else 2)
    # Four ranks cannot share two heads of keys.
    expected = [not (world == "tp4" and member[2] == "grouped") for member in CHOSEN]
    wanted = ["exact: blocks.0, blocks.1" if each else "exact: " for each in expected]
    assert found == wanted


@pytest.mark.slow
def test_sampled_blocks_are_never_wrong(worlds: Worlds) -> None:
    found = verdicts(worlds, one_module_blocks.sample(100, 1), "tp2", 2)
    assert all(each.startswith("exact") for each in found), found


@pytest.mark.parametrize(
    ("case", "number"),
    quick(
        [
            *itertools.product(("checkpointed", "captured", "compiled"), range(3)),
            *(("dropped_outside_of_steps", 0), ("hooked", 0)),
        ],
        [
            *(("checkpointed", 2), ("captured", 0), ("compiled", 1)),
            *(("dropped_outside_of_steps", 0), ("hooked", 0)),
        ],
    ),
)
def test_blocks(worlds: Worlds, case: str, number: int) -> None:
    run(worlds, WORLDS["tp2"], getattr(one_module_blocks, case), CHOSEN[number])
