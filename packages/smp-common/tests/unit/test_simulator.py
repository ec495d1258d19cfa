from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdistributed.modelparallel.common.errors import ScheduleDeadlock, ScheduleError
from smdistributed.modelparallel.common.planning import simulator
from smdistributed.modelparallel.common.planning.list_scheduling import (
    PassGraph,
    Policy,
    interleaved_policies,
    list_schedule,
    simple_policies,
    zero_bubble_policies,
)
from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Edge,
    Kind,
    Schedule,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import (
    CostModel,
    TimedAction,
    Timeline,
    build_schedule,
    simulate,
)

Pipeline = Literal["simple", "interleaved"]


def chain(visits: Sequence[int], costs: Sequence[float] | None = None) -> SegmentGraph:
    """Segments one after the other on the given ranks; backward takes twice as long."""
    costs = costs or [1.0] * len(visits)
    return SegmentGraph(
        tuple(
            Segment(index, rank, cost, 2 * cost, True, 100)
            for index, (rank, cost) in enumerate(zip(visits, costs, strict=True))
        ),
        tuple(Edge(index, index + 1, 8, True) for index in range(len(visits) - 1)),
        max(visits) + 1,
    )


STAIRCASES: dict[tuple[int, Pipeline], list[str]] = {
    (2, "simple"): ["F0 F1 F2 F3 B0 B1 B2 B3"] * 2,
    (4, "simple"): ["F0 F1 F2 F3 B0 B1 B2 B3"] * 4,
    (2, "interleaved"): ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    (4, "interleaved"): [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
}


@pytest.mark.parametrize(("stages", "pipeline"), STAIRCASES)
def test_staircases(stages: int, pipeline: Pipeline) -> None:
    timeline = build_schedule(chain(range(stages)), 4, pipeline, stages + 2)
    texts = [timeline.schedule.text(rank) for rank in range(stages)]
    assert texts == STAIRCASES[stages, pipeline]
    # Every rank works 4 * 3 and waits for the others to fill and drain: (stages - 1) * 3.
    assert timeline.makespan == 12 + 3 * (stages - 1)
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / timeline.makespan)
    held = [4] * stages if pipeline == "simple" else list(range(stages, 0, -1))
    assert timeline.peak_active_microbatches == tuple(held)
    assert timeline.peak_activation_bytes == tuple(100 * count for count in held)


def split_chain(num_ranks: int, weight: float = 1.0) -> SegmentGraph:
    """A chain whose backward passes are two: gradients of inputs, gradients of weights."""
    return SegmentGraph(
        tuple(
            Segment(index, index, 1.0, 1.0, True, 100, weight_cost=weight)
            for index in range(num_ranks)
        ),
        tuple(Edge(index, index + 1, 8, True) for index in range(num_ranks - 1)),
        num_ranks,
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("weight", [0.8, 1.0])
def test_weight_gradients_fill_the_bubble(num_ranks: int, weight: float) -> None:
    microbatches, active = 8, num_ranks + 2
    whole = build_schedule(chain(range(num_ranks)), microbatches, "interleaved", active)
    split = build_schedule(split_chain(num_ranks, weight), microbatches, "zero_bubble", active)
    # Forward and backward passes of the ranks before and behind: 3 units each.
    assert whole.makespan == 3 * microbatches + 3 * (num_ranks - 1)
    # No order is faster: the last rank begins when a microbatch has gone through the others.
    work = (2 + weight) * microbatches
    assert work + num_ranks - 1 <= split.makespan <= work + num_ranks
    assert max(split.peak_active_microbatches) <= active
    for rank in split.ranks:
        assert sum(one.end - one.start for one in rank) == pytest.approx(work)
    for rank in split.schedule.ranks:
        assert Counter(action.kind for action in rank) == {"F": 8, "I": 8, "W": 8}


@pytest.mark.parametrize("active", [1, 2, 3, 8])
def test_each_rank_keeps_to_the_bound(active: int) -> None:
    timeline = build_schedule(split_chain(3), 6, "zero_bubble", active)
    assert max(timeline.peak_active_microbatches) <= active
    assert max(timeline.peak_activation_bytes) <= 100 * active
    assert simulate(split_chain(3), timeline.schedule, 6).makespan == timeline.makespan


@pytest.mark.parametrize("microbatches", [8, 16])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_v_has_half_the_bubble_within_the_memory_of_a_chain(
    num_ranks: int, microbatches: int
) -> None:
    ranks = [*range(num_ranks), *range(num_ranks - 2, -1, -1)]
    segments = tuple(
        Segment(index, rank, cost, cost, True, round(200 * cost), weight_cost=cost)
        for index, rank in enumerate(ranks)
        for cost in [1.0 if rank == num_ranks - 1 else 0.5]
    )
    edges = tuple(Edge(index, index + 1, 8, True) for index in range(len(ranks) - 1))
    graph = SegmentGraph(segments, edges, num_ranks)
    timeline = build_schedule(graph, microbatches, "zero_bubble", num_ranks)
    # The last rank begins when a microbatch has gone through half of what the others have.
    assert timeline.makespan == 3 * microbatches + (num_ranks - 1) / 2
    assert max(timeline.peak_kept) <= num_ranks
    assert max(timeline.peak_activation_bytes) <= 200 * num_ranks


def uneven_v(activation_bytes: tuple[int, ...] = (0,) * 7) -> SegmentGraph:
    """A V over four ranks, the first of which has most to do."""
    ranks, loads = (0, 1, 2, 3, 2, 1, 0), (4, 4, 4, 8.5, 4.5, 4.5, 5)
    segments = tuple(
        Segment(index, rank, load, 1.2 * load, True, num_bytes, weight_cost=0.9 * load)
        for index, (rank, load, num_bytes) in enumerate(
            zip(ranks, loads, activation_bytes, strict=True)
        )
    )
    edges = tuple(Edge(index, index + 1, 8, True) for index in range(6))
    return SegmentGraph(segments, edges, 4)


def test_more_microbatches_begin_where_each_keeps_a_part() -> None:
    graph = uneven_v()
    work = 8 * max(
        sum(segment.forward_cost * 3.1 for segment in graph.segments if segment.rank == rank)
        for rank in range(4)
    )
    timeline = build_schedule(graph, 8, "zero_bubble", 6)
    assert max(timeline.peak_kept) <= 6
    assert timeline.peak_active_microbatches[0] == 8
    # Counted by whole microbatches, rank 0 would wait for the first one to come back: 1.10.
    assert timeline.makespan < 1.03 * work


def test_what_is_kept_is_counted_in_bytes_where_they_are_known() -> None:
    graph = uneven_v((100, 100, 100, 400, 300, 300, 300))
    assert graph.kept == (0.25, 0.25, 0.25, 1.0, 0.75, 0.75, 0.75)
    timeline = build_schedule(graph, 8, "zero_bubble", 4)
    assert max(timeline.peak_activation_bytes) <= 4 * 400
    assert timeline.peak_kept == tuple(each / 400 for each in timeline.peak_activation_bytes)


def test_only_the_gradients_of_inputs_are_waited_for() -> None:
    graph = split_chain(2)
    early = simulate(graph, Schedule.parse(["F0 I0 W0", "F0 I0 W0"]), 1)
    assert [one.start for one in early.ranks[0]] == [0, 3, 4]
    late = simulate(graph, Schedule.parse(["F0 F1 I0 I1 W0 W1", "F0 I0 F1 I1 W0 W1"]), 2)
    assert late.ranks[0][2].start == 3


def test_activations_are_held_until_the_gradients_of_weights() -> None:
    timeline = simulate(split_chain(1), Schedule.parse(["F0 I0 F1 I1 W0 W1"]), 2)
    assert timeline.peak_activation_bytes == (200,)
    timeline = simulate(split_chain(1), Schedule.parse(["F0 I0 W0 F1 I1 W1"]), 2)
    assert timeline.peak_activation_bytes == (100,)


def test_weights_before_the_gradients_that_they_need_deadlock() -> None:
    with pytest.raises(ScheduleDeadlock, match="stuck at W0@0: waits for I0@0"):
        simulate(split_chain(1), Schedule.parse(["F0 W0 I0"]), 1)


def test_one_microbatch_in_flight_is_sequential() -> None:
    timeline = build_schedule(chain([0, 1, 0]), 2, "interleaved", 1)
    assert timeline.schedule.text(0) == "F0@0 F0@2 B0@2 B0@0 F1@0 F1@2 B1@2 B1@0"
    assert timeline.makespan == 18.0


def test_forward_only() -> None:
    graph = SegmentGraph(
        tuple(Segment(index, index, 1.0, 0.0, False, 100) for index in range(2)),
        (Edge(0, 1, 8, False),),
        2,
    )
    timeline = build_schedule(graph, 3, "interleaved", 4)
    assert [timeline.schedule.text(rank) for rank in range(2)] == ["F0 F1 F2"] * 2
    assert timeline.makespan == 4.0
    assert timeline.peak_activation_bytes == (100, 100)


def test_transfers_and_overheads_take_time() -> None:
    costs = CostModel(latency=0.5, seconds_per_byte=0.25, action_overhead=0.125)
    timeline = build_schedule(chain([0, 1]), 1, "interleaved", 1, costs)
    transfer = 0.5 + 8 * 0.25
    assert timeline.ranks[1][0].start == 1.125 + transfer
    assert timeline.makespan == (1 + 1 + 2 + 2) + 4 * 0.125 + 2 * transfer
    local = build_schedule(chain([0, 0]), 1, "interleaved", 1, costs)
    assert local.makespan == 6 + 4 * 0.125


def test_a_gradient_is_as_large_as_its_value_and_a_mask_has_none() -> None:
    graph = SegmentGraph(
        tuple(Segment(index, index, 1.0, 2.0, True) for index in range(2)),
        (Edge(0, 1, 8, True), Edge(0, 1, 2, False)),
        2,
    )
    timeline = build_schedule(graph, 1, "simple", 1, CostModel(seconds_per_byte=1.0))
    assert timeline.ranks[1][0].start == 1 + 10
    assert timeline.ranks[0][1].start == 1 + 10 + 3 + 8


@pytest.mark.parametrize(
    ("visits", "costs", "num_microbatches", "active", "speedup"),
    [
        # Plain backward-first reaches 1.85, 2.31, 3.20 and 5.27.
        ([0, 1, 0], [0.5, 1, 0.5], 8, 4, 1.84),
        ([0, 1, 2, 3, 0], [0.7, 1, 1, 1, 0.3], 8, 6, 2.96),
        ([0, 1, 2, 3, 0], [0.7, 1, 1, 1, 0.3], 32, 6, 3.67),
        ([*range(8), 0], [0.6, *[1] * 7, 0.4], 32, 10, 6.15),
    ],
)
def test_a_rank_that_is_visited_twice_does_not_starve_the_others(
    visits: list[int], costs: list[float], num_microbatches: int, active: int, speedup: float
) -> None:
    timeline = build_schedule(chain(visits, costs), num_microbatches, "interleaved", active)
    assert 3 * sum(costs) * num_microbatches / timeline.makespan >= speedup
    assert max(timeline.peak_active_microbatches) <= active


def test_more_memory_is_never_slower() -> None:
    graph = chain([0, 1, 2, 3, 0], [0.7, 1, 1, 1, 0.3])
    spans = [build_schedule(graph, 16, "interleaved", active).makespan for active in (1, 2, 4, 8)]
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize(("active", "is_best"), [(4, True), (1, False)])
def test_nothing_else_is_tried_once_no_order_can_be_faster(
    active: int, is_best: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Policy] = []

    def run(
        graph: PassGraph, num_microbatches: int, policy: Policy, limit: float
    ) -> list[list[int]] | None:
        tried.append(policy)
        return list_schedule(graph, num_microbatches, policy, limit)

    monkeypatch.setattr(simulator, "list_schedule", run)
    graph = chain(range(4))
    timeline = build_schedule(graph, 8, "interleaved", active)
    shortest = PassGraph(graph, CostModel()).shortest_time(8)
    # A chain of equal passes has no better order than 1F1B, the first one, if it has the memory.
    assert (timeline.makespan == pytest.approx(shortest)) == is_best
    assert (len(tried) == 1) == is_best


@st.composite
def graphs(draw: st.DrawFn) -> SegmentGraph:
    num_ranks = draw(st.integers(1, 4))
    count = draw(st.integers(1, 7))
    known = draw(st.booleans())
    times = st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5])
    segments = tuple(
        Segment(
            index,
            draw(st.integers(0, num_ranks - 1)),
            draw(times),
            draw(times),
            draw(st.integers(0, 4)) > 0,
            draw(st.integers(0, 100)) if known else 0,
            draw(st.sampled_from([None, 0.0, 0.2, 1.0])),
        )
        for index in range(count)
    )
    pairs = [(source, target) for target in range(count) for source in range(target)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    edges = tuple(
        Edge(source, target, draw(st.integers(0, 9)), draw(st.booleans()))
        for source, target in chosen
    )
    return SegmentGraph(segments, edges, num_ranks)


@settings(max_examples=200, deadline=None)
@given(
    graph=graphs(),
    num_microbatches=st.integers(1, 7),
    active=st.integers(1, 8),
    pipeline=st.sampled_from(["simple", "interleaved", "zero_bubble"]),
    costs=st.sampled_from([CostModel(), CostModel(0.2, 0.01, 0.05)]),
)
def test_every_plan_is_valid(
    graph: SegmentGraph, num_microbatches: int, active: int, pipeline: Pipeline, costs: CostModel
) -> None:
    timeline = build_schedule(graph, num_microbatches, pipeline, active, costs)
    dependencies = graph.dependencies(num_microbatches)
    timed = {one.action: one for actions in timeline.ranks for one in actions}
    planned = Counter(action for actions in timeline.schedule.ranks for action in actions)
    assert planned == Counter(dependencies.keys())
    for action, waits in dependencies.items():
        for earlier in waits:
            assert timed[earlier].end <= timed[action].start + 1e-9
    for rank, actions in enumerate(timeline.ranks):
        assert all(graph.segments[one.action.segment].rank == rank for one in actions)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(actions))
        kinds = [one.action.kind for one in actions]
        if pipeline == "simple":
            assert kinds == sorted(kinds, key=lambda kind: kind.is_backward)
    if pipeline == "interleaved":
        assert max(timeline.peak_active_microbatches) <= active
    if pipeline == "zero_bubble":
        assert max(timeline.peak_kept) <= active + 1e-6
    shortest = PassGraph(graph, costs).shortest_time(num_microbatches)
    assert shortest <= timeline.makespan + 1e-9
    assert simulate(graph, timeline.schedule, num_microbatches, costs) == timeline
    again = build_schedule(graph, num_microbatches, pipeline, active, costs)
    assert again.schedule.digest() == timeline.schedule.digest()
    assert_receives_can_follow_the_senders_order(graph, timeline.schedule, num_microbatches)


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(),
    num_microbatches=st.integers(1, 7),
    active=st.integers(1, 8),
    costs=st.sampled_from([CostModel(), CostModel(0.2, 0.01, 0.05)]),
)
def test_only_orders_that_take_too_long_are_given_up(
    graph: SegmentGraph, num_microbatches: int, active: int, costs: CostModel
) -> None:
    passes = PassGraph(graph, costs)
    policies = [*simple_policies(), *interleaved_policies(active)]
    policies += zero_bubble_policies(graph, active, thorough=True)
    for policy in policies[::3]:
        order = list_schedule(passes, num_microbatches, policy)
        assert order is not None
        longest = max(simulator._end_times(passes, num_microbatches, order), default=0.0)
        assert list_schedule(passes, num_microbatches, policy, longest * 1.001 + 1e-6) == order
        if policy.waits_at_home and longest:
            assert list_schedule(passes, num_microbatches, policy, longest * 0.999) is None


def assert_receives_can_follow_the_senders_order(
    graph: SegmentGraph, schedule: Schedule, num_microbatches: int
) -> None:
    """Runs the schedule over one first-in-first-out channel for each pair of ranks.

    A sender never waits. A receiver takes messages as they were sent until it has what its next
    action needs, and keeps what it took.
    """
    dependencies = graph.dependencies(num_microbatches)
    rank_of = {action: graph.segments[action.segment].rank for action in dependencies}
    readers: dict[Action, set[int]] = defaultdict(set)
    for action, waits in dependencies.items():
        for earlier in waits:
            readers[earlier].add(rank_of[action])
    done: set[Action] = set()
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    held: list[set[Action]] = [set() for _ in range(graph.num_ranks)]

    def try_action(rank: int, action: Action) -> bool:
        for earlier in dependencies[action]:
            channel = channels[rank_of[earlier], rank]
            while earlier not in held[rank] and channel:
                held[rank].add(channel.popleft())
        if not held[rank].issuperset(dependencies[action]):
            return False
        done.add(action)
        held[rank].add(action)
        for reader in readers[action] - {rank}:
            channels[rank, reader].append(action)
        return True

    left = [deque(actions) for actions in schedule.ranks]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(left):
            while actions and try_action(rank, actions[0]):
                actions.popleft()
                progress = True
    assert len(done) == len(dependencies)


def test_a_deadlock_names_what_each_rank_waits_for() -> None:
    graph = chain([0, 1, 2])
    swapped = Schedule.parse(["F1 F0 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"])
    simulate(graph, swapped, 2)  # another order, and a valid one
    wrong = Schedule.parse(["F0 B0 F1 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"])
    with pytest.raises(ScheduleDeadlock) as caught:
        simulate(graph, wrong, 2)
    assert str(caught.value).splitlines()[1:] == [
        "  rank 0 is stuck at B0@0: waits for B0@1 on rank 1",
        "  rank 1 is stuck at F1@1: waits for F1@0 on rank 0",
        "  rank 2 is stuck at F1@2: waits for F1@1 on rank 1",
    ]


def test_two_dependent_actions_swapped_on_one_rank_deadlock() -> None:
    schedule = Schedule.parse(["B0 F0"])
    with pytest.raises(ScheduleDeadlock, match="rank 0 is stuck at B0@0: waits for F0@0 on rank 0"):
        simulate(chain([0]), schedule, 1)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["F0 B0"], "one order a rank"),
        (["F0 B0", "F0"], "without 1 of them .B0@1."),
        (["F0 B0", "F0 B0 F0"], "received F0@1 on rank 1"),
        (["F0 B0 F0@1", "B0"], "received F0@1 on rank 0"),
        (["F0 B0", "F0 B0 F1"], "received F1@1"),
    ],
)
def test_a_schedule_of_another_graph_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(chain([0, 1]), Schedule.parse(texts), 1)


@pytest.mark.parametrize(
    ("num_microbatches", "pipeline", "active"),
    [(0, "simple", 1), (1, "interleaved", 0), (1, "zigzag", 1)],
)
def test_arguments_out_of_range(num_microbatches: int, pipeline: Pipeline, active: int) -> None:
    with pytest.raises(ScheduleError, match="received"):
        build_schedule(chain([0]), num_microbatches, pipeline, active)


def test_a_measured_timeline_may_start_at_any_time() -> None:
    timeline = Timeline(
        (
            (
                TimedAction(Action(Kind.FORWARD, 0, 0), 100.0, 101.0),
                TimedAction(Action(Kind.BACKWARD, 0, 0), 102.0, 104.0),
            ),
            (),
        )
    )
    assert timeline.makespan == 4.0
    assert timeline.bubble_fractions == (0.25, 1.0)
    assert timeline.bubble_fraction == 0.625
    assert timeline.peak_active_microbatches == (1, 0)
    assert timeline.peak_activation_bytes == (0, 0)
    assert Timeline(((),)).bubble_fraction == 0.0


@pytest.mark.parametrize(
    ("num_ranks", "microbatches"),
    [
        (64, 64),
        pytest.param(64, 512, marks=pytest.mark.slow),
        pytest.param(16, 512, marks=pytest.mark.slow),
    ],
)
def test_a_large_plan_is_whole(num_ranks: int, microbatches: int) -> None:
    graph = chain([index % num_ranks for index in range(64)])
    timeline = build_schedule(graph, microbatches, "interleaved", 66)
    assert sum(map(len, timeline.ranks)) == 2 * 64 * microbatches
    assert max(timeline.peak_active_microbatches) <= 66


def test_costs_that_nobody_measured_give_transfers_some_time() -> None:
    graph = chain([0, 1])
    costs = CostModel.unmeasured(graph)
    assert 0 < costs.latency < 0.2 * graph.segments[0].forward_cost
    waits = build_schedule(graph, 8, "interleaved", 4).schedule
    hides = build_schedule(graph, 8, "interleaved", 4, costs).schedule
    late = CostModel(latency=0.3 * graph.segments[0].forward_cost)
    assert simulate(graph, hides, 8, late).makespan < simulate(graph, waits, 8, late).makespan


def test_costs_that_are_a_little_wrong_hide_no_transfers() -> None:
    graph = chain([0, 1])
    late = CostModel(latency=0.1 * graph.segments[0].forward_cost)
    best = build_schedule(graph, 8, "interleaved", 4, late).makespan
    # As if one partition waited for the other one anyway.
    for factors in ((1.0, 1.03), (1.03, 1.0)):
        segments = tuple(
            replace(
                segment,
                forward_cost=factor * segment.forward_cost,
                backward_cost=factor * segment.backward_cost,
            )
            for segment, factor in zip(graph.segments, factors, strict=True)
        )
        guess = replace(graph, segments=segments)
        costs = CostModel.unmeasured(guess)
        plan = build_schedule(guess, 8, "interleaved", 4, costs).schedule
        assert simulate(graph, plan, 8, late).makespan == pytest.approx(best)
