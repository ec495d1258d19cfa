"""Gradients over replicas and partitions, in real processes; one job a topology runs all cases."""

from __future__ import annotations

import functools
from typing import Any

import gradient_cases
import pytest
from world import Result, run_cases, skip_without_devices, values

from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

#: ranks, configuration, groups of cases
WORLDS: dict[str, tuple[int, dict[str, object], tuple[str, ...]]] = {
    "dp2": (2, {"pipeline_parallel_degree": 1, "ddp": True}, ("REPLICATED",)),
    "pp2": (2, {"pipeline_parallel_degree": 2}, ("PARTITIONED",)),
    "pp4": (4, {"pipeline_parallel_degree": 4}, ("PARTITIONED",)),
    "pp2-dp2": (4, {"pipeline_parallel_degree": 2, "ddp": True}, ("REPLICATED", "BOTH")),
}


def _cases(groups: tuple[str, ...]) -> dict[str, Any]:
    return {name: case for group in groups for name, case in getattr(gradient_cases, group).items()}


def run_world(config: dict[str, object], groups: tuple[str, ...]) -> dict[str, Result]:
    return run_cases({"microbatches": gradient_cases.MICROBATCHES, **config}, _cases(groups))


@functools.cache
def outcome(name: str) -> tuple[dict[str, Result], ...]:
    num_ranks, config, groups = WORLDS[name]
    skip_without_devices(num_ranks)
    return run_ranks(num_ranks, run_world, timeout=150, args=[config, groups]).results


@pytest.mark.parametrize(
    ("world", "case"),
    [(world, case) for world, (_, _, groups) in WORLDS.items() for case in _cases(groups)],
)
def test_gradients_are_those_of_one_process(world: str, case: str) -> None:
    values(outcome(world), case)
