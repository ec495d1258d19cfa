from __future__ import annotations

from smdistributed.modelparallel.common.planning.list_scheduling import (
    CostModel,
    PassGraph,
    Policy,
    interleaved_policies,
    list_schedule,
)
from smdistributed.modelparallel.common.planning.schedule import Edge, Segment, SegmentGraph


def texts(graph: SegmentGraph, num: int, policy: Policy, costs: CostModel) -> list[str]:
    passes = PassGraph(graph, costs)
    return [
        " ".join(
            f"{passes.passes[task % len(passes.passes)][0]}{task // len(passes.passes)}"
            f"@{passes.passes[task % len(passes.passes)][1]}"
            for task in order
        )
        for order in list_schedule(passes, num, policy)
    ]


def stages(count: int) -> SegmentGraph:
    return SegmentGraph(
        tuple(Segment(index, index, 1.0, 1.0, True) for index in range(count)),
        tuple(Edge(index, index + 1, 8, True) for index in range(count - 1)),
        count,
    )


def test_a_backward_pass_that_can_run_is_preferred() -> None:
    assert texts(stages(2), 4, Policy(), CostModel()) == [
        "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0",
        "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 F3@1 B3@1",
    ]


def test_memory_bounds_hold_forward_passes_back() -> None:
    assert texts(stages(2), 3, Policy(max_in_flight=1), CostModel())[0] == (
        "F0@0 B0@0 F1@0 B1@0 F2@0 B2@0"
    )
    assert texts(stages(2), 4, Policy(slack=1.0), CostModel())[0] == (
        "F0@0 F1@0 B0@0 F2@0 B1@0 F3@0 B2@0 B3@0"
    )


def test_a_value_counts_when_it_has_arrived() -> None:
    # Segment 1 prefers the value of rank 0, but has something else to do until it arrives.
    graph = SegmentGraph(
        (
            Segment(0, 0, 1.0, 0.0, False),
            Segment(1, 1, 1.0, 0.0, False),
            Segment(2, 1, 1.0, 0.0, False),
            Segment(3, 1, 1.0, 0.0, False),
        ),
        (Edge(1, 2, 8, False), Edge(0, 3, 8, False)),
        2,
    )
    assert texts(graph, 1, Policy(), CostModel())[1] == "F0@1 F0@3 F0@2"
    assert texts(graph, 1, Policy(), CostModel(latency=0.5))[1] == "F0@1 F0@2 F0@3"


def test_the_first_interleaved_policy_is_the_leanest() -> None:
    assert interleaved_policies(4)[0] == Policy(max_in_flight=4, slack=1.0)
    assert {policy.max_in_flight for policy in interleaved_policies(4)} == {3, 4}
    assert {policy.max_in_flight for policy in interleaved_policies(1)} == {1}
