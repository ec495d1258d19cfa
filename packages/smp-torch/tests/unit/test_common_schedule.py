from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.torch.plan.common_schedule import common_schedule
from smdistributed.modelparallel.torch.plan.segments import Plan

WIDTH = 4


class Zigzag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index not in self.dropped:
                x = torch.relu(layer(x))
        return x


def plans(*dropped: set[int]) -> list[Plan]:
    module = Zigzag()
    step = Recorded(module, {f"layers.{index}": index % 2 for index in range(4)})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = module(x).sum()
        step.backward(loss)
        return loss

    found = []
    for each in dropped:
        module.dropped = set()
        step.place(body, torch.ones(2, WIDTH))
        module.dropped = each
        found.append(step.plan(body, torch.ones(2, WIDTH)))
    return found


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble"])
def test_each_microbatch_does_what_its_plan_has_in_order(pipeline: Any) -> None:
    mixed = plans(set(), {1}, {0, 3}, {1, 2})
    schedule = common_schedule(mixed, 2, pipeline, 4)
    for microbatch, plan in enumerate(mixed):
        own = [
            [action for action in actions if action.microbatch == microbatch]
            for actions in schedule.ranks
        ]
        for rank, actions in enumerate(own):
            forward = [each.segment for each in actions if each.kind is Kind.FORWARD]
            halves = [each.segment for each in actions if each.kind is Kind.WEIGHT_GRADIENTS]
            first = (Kind.BACKWARD, Kind.INPUT_GRADIENTS)
            backward = [each.segment for each in actions if each.kind in first]
            expected = [each.index for each in plan.segments if each.rank == rank]
            assert forward == expected
            assert backward == [index for index in reversed(expected) if index in plan.backward]
            assert sorted(halves) == sorted(backward if pipeline == "zero_bubble" else [])


def test_halves_are_chosen_where_they_are_faster() -> None:
    (plan,) = plans(set())

    def kinds(num_microbatches: int) -> set[Kind]:
        schedule = common_schedule([plan] * num_microbatches, 2, "auto", 4)
        return {each.kind for actions in schedule.ranks for each in actions}

    assert kinds(4) == {Kind.FORWARD, Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS}
    for segment in plan.segments:
        segment.weight_flops = 0
    assert kinds(4) == {Kind.FORWARD, Kind.BACKWARD}
