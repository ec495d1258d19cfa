"""Experts that ranks have between them, in real processes, against one process."""

from __future__ import annotations

from typing import Any

import expert_cases
import pytest
import torch
from torch import nn
from world import quick, run, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def spreading(ranks: int, degree: int = 2, microbatches: int = 2, **config: Any) -> World:
    """Returns a world whose ranks have experts between them."""
    given = {"expert_parallel_degree": degree, "ddp": True, "microbatches": microbatches}
    return world_of(ranks, {**given, **config})


SPREAD = [each.__name__ for each in expert_cases.SPREAD]
WHOLE = [each.__name__ for each in expert_cases.WHOLE]
WORLDS = {
    "ep2": (spreading(2), {"microbatches": 2}),
    "pp2-ep2": (spreading(4, pipeline_parallel_degree=2), {"microbatches": 2}),
    "ep4": (spreading(4, 4, 1), {"microbatches": 1}),
    "ep2-prescaled": (
        spreading(2, 2, 4, prescaled_batch=True),
        {"microbatches": 4, "prescaled": True},
    ),
    "ep2-sharded": (spreading(4, sharded_data_parallel_degree=2), {"microbatches": 2}),
    "ep2-owners": (spreading(4, shard_optimizer_state=True), {"microbatches": 2}),
}


#: An expert that gets most leaves a rank without tokens.
MODELS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "spread": (SPREAD, {}),
    "favoured": (["Hit", "Batched"], {"favourite": 0, "checkpointed": True}),
    "few": (["Hit"], {"few": True}),
    "whole": (WHOLE, {}),
}
NUM_SPREAD = {"spread": len(SPREAD), "favoured": 2, "few": 1, "whole": 0}
#: All models where each rank has all layers; a pipeline records each, and here those whose experts
#: are spread in each way, and whose shapes follow from the routing.
CASES = [
    *((name, tuple(MODELS)) for name in WORLDS),
    ("pp2-ep2", ("spread", "few")),
]


def trained(names: tuple[str, ...], options: dict[str, Any]) -> list[tuple[float, int]]:
    """Trains models of each kind."""
    return [
        expert_cases.beside_one_process(kinds, **given, **options)
        for kinds, given in map(MODELS.__getitem__, names)
    ]


@pytest.mark.parametrize(
    ("name", "models"),
    quick(CASES, [CASES[0], CASES[-1]]),
    ids=[f"{name}-{len(models)}" for name, models in CASES],
)
def test_experts_of_all_ranks_give_what_one_process_gives(
    worlds: Worlds, name: str, models: tuple[str, ...]
) -> None:
    world, options = WORLDS[name]
    for found in run(worlds, world, trained, models, options):
        near = 1e-8 if name == "ep2-sharded" else 1e-12  # the norm of shards is of fp32
        assert max(far for far, _ in found) < near, found
        if name != "pp2-ep2":  # each rank has one partition
            assert [spread for _, spread in found] == [NUM_SPREAD[each] for each in models]


def refused() -> list[str]:
    """Calls experts as they cannot be called; returns what is said."""
    said = []
    for change in ("expert", "weights"):
        model = smp.DistributedModel(expert_cases.Stack())

        @smp.step
        def forward(model: nn.Module, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            weights = torch.ones(len(x), 2 if change == "expert" else 3)  # noqa: B023
            return model(x, index, weights)

        index = torch.full((8, 2), 4 if change == "expert" else 0)
        with pytest.raises(UnsupportedError) as caught:
            forward(model, torch.ones(8, expert_cases.WIDTH), index)
        said.append(str(caught.value))
    return said


def test_calls_that_cannot_be_spread_are_refused_by_name(worlds: Worlds) -> None:
    for said in run(worlds, WORLDS["ep2"][0], refused):
        assert "experts 0 to 3; received experts 4 to 4" in said[0]
        assert "it was called with something else" in said[1]
