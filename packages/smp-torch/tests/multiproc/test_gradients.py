"""Gradients over replicas and partitions, in real processes."""

from __future__ import annotations

from typing import Any

import gradient_cases
import pytest
from world import pipeline, replicas, run

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

MICROBATCHES = gradient_cases.MICROBATCHES
WORLDS = {
    "dp2": replicas(2, 1, MICROBATCHES),
    "pp2": pipeline(2, MICROBATCHES),
    "pp4": pipeline(4, MICROBATCHES, launcher="fork"),
    "pp2-dp2": replicas(2, 2, MICROBATCHES),
}
#: The groups of cases that a world runs.
GROUPS = {
    "dp2": ("REPLICATED",),
    "pp2": ("PARTITIONED",),
    "pp4": ("PARTITIONED",),
    "pp2-dp2": ("REPLICATED", "BOTH"),
}
#: What the larger worlds run of groups that a smaller one runs whole.
FEW = {
    "pp4": ("a_rank_without_parameters",),
    "pp2-dp2": (
        *("reduction_small_buckets", "join", "two_models_of_one_loss"),
        *gradient_cases.BOTH,
    ),
}


def run_case(group: str, case: str) -> Any:
    return getattr(gradient_cases, group)[case]()


@pytest.mark.parametrize(
    ("world", "group", "case"),
    [
        pytest.param(
            *(world, group, case),
            marks=() if case in FEW.get(world, (case,)) else pytest.mark.slow,
        )
        for world, groups in GROUPS.items()
        for group in groups
        for case in getattr(gradient_cases, group)
    ],
)
def test_gradients_are_those_of_one_process(
    worlds: Worlds, world: str, group: str, case: str
) -> None:
    run(worlds, WORLDS[world], run_case, group, case)
