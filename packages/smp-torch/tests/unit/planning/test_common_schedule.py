from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.planning.choosing import fastest, lean_or_fastest
from smdistributed.modelparallel.common.planning.partitioner import Unit, partition
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.schedule import (
    Edge,
    Kind,
    Schedule,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import (
    CostModel,
    build_schedule,
    simulate,
)
from smdistributed.modelparallel.torch.planning.common_schedule import common_schedule, one_by_one
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.planning.shapes import v_gains
from smdistributed.modelparallel.torch.planning.statistics import statistics_in_turn

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


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble", "zero_bubble_v"])
def test_each_microbatch_does_what_its_plan_has_in_order(pipeline: Any) -> None:
    mixed = plans(set(), {1}, {0, 3}, {1, 2})
    schedule = common_schedule(mixed, 2, pipeline, 4).schedule
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
            assert sorted(halves) == sorted(backward if "zero_bubble" in pipeline else [])


def test_halves_are_chosen_where_they_are_faster() -> None:
    (plan,) = plans(set())

    def kinds(num_microbatches: int) -> set[Kind]:
        schedule = common_schedule([plan] * num_microbatches, 2, "auto", 4).schedule
        return {each.kind for actions in schedule.ranks for each in actions}

    assert kinds(4) == {Kind.FORWARD, Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS}
    for segment in plan.segments:
        segment.costs = replace(segment.costs, weights=0.0)
    assert kinds(4) == {Kind.FORWARD, Kind.BACKWARD}


def test_an_order_is_chosen_that_transfers_do_not_hold_up() -> None:
    ranks = (0, 1, 0)
    segments = (
        Segment(index, rank, cost, cost, has_backward=True, weight_cost=cost)
        for index, (rank, cost) in enumerate(zip(ranks, (0.5, 1.0, 0.5), strict=True))
    )
    edges = tuple(Edge(index, index + 1, num_bytes=0, has_grad=True) for index in range(2))
    graph = SegmentGraph(tuple(segments), edges, 2)
    busy = build_schedule(graph, 16, "zero_bubble", 4)
    assert busy.makespan == 48.5
    transfers = CostModel(latency=0.02)
    assert simulate(graph, busy.schedule, 16, transfers).makespan > 49
    found = fastest(graph, 16, "zero_bubble", 4)
    assert found.makespan == simulate(graph, found.schedule, 16, transfers).makespan < 48.6


@pytest.mark.parametrize(("num_ranks", "in_flight"), [(2, 2), (4, 4)])
def test_memory_is_kept_for_what_it_gains(num_ranks: int, in_flight: int) -> None:
    segments = (
        Segment(rank, rank, 1.0, 1.0, has_backward=True, weight_cost=1.0)
        for rank in range(num_ranks)
    )
    edges = tuple(Edge(rank, rank + 1, 0, has_grad=True) for rank in range(num_ranks - 1))
    graph = SegmentGraph(tuple(segments), edges, num_ranks)
    best = fastest(graph, 8, "zero_bubble", num_ranks + 2)
    found = lean_or_fastest(graph, 8, "zero_bubble", num_ranks + 2)
    assert max(found.peak_active_microbatches) == in_flight
    assert best.makespan <= found.makespan < 1.01 * best.makespan
    assert lean_or_fastest(graph, 8, "interleaved", num_ranks + 2) == fastest(
        graph, 8, "interleaved", num_ranks + 2
    )


@pytest.mark.parametrize(
    ("weights", "num_partitions", "num_microbatches", "gains"),
    [
        ([1] * 16, 4, 8, True),
        ([1] * 16, 2, 4, True),
        # What is left of the bubble is less than counted costs are worth.
        ([1] * 16, 2, 64, False),
        ([3, 3, 1, 3, 3], 2, 8, True),
        # The heavy end leaves its rank no second piece, or one that is better elsewhere.
        ([1, 1, 1, 1, 1, 9], 2, 8, False),
        ([2, 1, 1], 2, 8, False),
    ],
)
def test_a_v_is_taken_where_it_is_faster(
    weights: list[int], num_partitions: int, num_microbatches: int, gains: bool
) -> None:
    units = tuple(Unit(f"u{place}", w, w, place) for place, w in enumerate(weights))
    root = Unit("", 0, 0, 0, children=units)
    shapes = [partition(root, num_partitions, 0.5, v_shaped=v_shaped) for v_shaped in (False, True)]
    bounds = num_microbatches, num_partitions + 2
    whole = PassCosts(forward=sum(weights), backward=2 * sum(weights), weights=0.9 * sum(weights))
    assert v_gains(shapes[0], shapes[1], *bounds, whole) == gains


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[1](self.norm(self.layers[0](x)))
        return out


@pytest.mark.parametrize(
    ("orders", "must_wait"),
    [
        (("F0 F1 B0 B1", "F0 B0 F1 B1"), True),
        (("F0 B0 F1 B1", "F0 B0 F1 B1"), False),
        (("F0 I0 F1 I1 W0 W1", "F0 B0 F1 B1"), False),
    ],
)
def test_statistics_that_change_between_two_passes_are_found(
    orders: tuple[str, str], must_wait: bool
) -> None:
    module = Normed()
    step = Recorded(module, {"layers.0": 0, "norm": 0, "layers.1": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = module(x).sum()
        step.backward(loss)
        return loss

    found = []
    for trains in (False, True):
        module.norm.train(trains)
        found.append(step.plan(body, torch.ones(2, WIDTH)))
    schedule = Schedule.parse(orders)
    for alike in found:
        assert not statistics_in_turn([alike, alike], schedule)
    reasons = statistics_in_turn(found, schedule)
    assert bool(reasons) is must_wait
    assert all(reason.startswith("a BatchNorm1d in norm changes its state") for reason in reasons)
    assert not statistics_in_turn(found, one_by_one(found, 2))


def test_microbatches_can_run_as_in_one_process() -> None:
    module = Normed()
    step = Recorded(module, {"layers.0": 0, "norm": 1, "layers.1": 0})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = module(x).sum()
        step.backward(loss)
        return loss

    plan = step.plan(body, torch.ones(2, WIDTH))
    assert one_by_one([plan, plan], 2) == Schedule.parse(
        [
            "F0@0 F0@2 B0@2 B0@0 F1@0 F1@2 B1@2 B1@0",
            "F0@1 B0@1 F1@1 B1@1",
        ]
    )
