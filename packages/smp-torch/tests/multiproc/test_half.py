"""Half precision, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import half_cases
import pytest
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def half(kind: str, ranks: int, **config: Any) -> World:
    """Returns a world of ``fp16`` or ``bf16``."""
    return world_of(ranks, {kind: True, "microbatches": 4, "ddp": True, **config})


WORLDS = {
    f"{kind}-{name}": half(kind, ranks, **config)
    for kind in ("fp16", "bf16")
    for name, ranks, config in (
        ("dp2", 2, {}),
        ("pp2", 2, {"pipeline_parallel_degree": 2}),
        ("pp2-dp2", 4, {"pipeline_parallel_degree": 2}),
    )
}
#: What runs by default; the rest is for releases.
QUICK = {
    "fp16-dp2": None,
    "fp16-pp2": (
        *("adam", "clipped", "overflow_on_one_rank", "state_goes_on"),
        *("delayed_parameters_are_cast", "groups_and_frozen_parameters"),
    ),
}


def run_case(name: str) -> None:
    for group in (half_cases.BIT_FOR_BIT, half_cases.FP16, half_cases.BOTH):
        if name in group:
            group[name]()


def cases(world: str) -> list[str]:
    kinds = [half_cases.BIT_FOR_BIT, half_cases.BOTH]
    kinds += [half_cases.FP16] if world.startswith("fp16") else []
    return [name for kind in kinds for name in kind]


def is_quick(world: str, case: str) -> bool:
    chosen = QUICK.get(world, ())
    return chosen is None or case in chosen


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=() if is_quick(world, case) else pytest.mark.slow)
        for world in WORLDS
        for case in cases(world)
    ],
)
def test_half_precision(worlds: Worlds, world: str, case: str) -> None:
    run(worlds, WORLDS[world], run_case, case)


def around_a_checkpoint(path: str, resume: bool) -> list[float]:
    return half_cases.losses_around_a_checkpoint(path, resume=resume)


LAYOUTS = {
    "pp2": WORLDS["fp16-pp2"],
    "one": half("fp16", 1),
    "pp3": half("fp16", 3, pipeline_parallel_degree=3),
}


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(one, other, marks=() if (one, other) == ("pp2", "one") else pytest.mark.slow)
        for one in LAYOUTS
        for other in LAYOUTS
    ],
)
def test_checkpoints_fit_any_pipeline_to_the_bit(
    worlds: Worlds, tmp_path: Path, saved: str, resumed: str
) -> None:
    path = str(tmp_path)
    want = run(worlds, LAYOUTS[saved], around_a_checkpoint, path, False)[0]
    for got in run(worlds, LAYOUTS[resumed], around_a_checkpoint, path, True):
        assert got == want


def run_slices() -> None:
    half_cases.slices()


def test_slices_in_half_precision(worlds: Worlds) -> None:
    run(worlds, half("fp16", 4, tensor_parallel_degree=2, shard_optimizer_state=True), run_slices)
