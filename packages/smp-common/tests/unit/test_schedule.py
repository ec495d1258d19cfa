from __future__ import annotations

import subprocess
import sys

import pytest

from smdistributed.modelparallel.common.errors import PartitionError, ScheduleError
from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Edge,
    Kind,
    Schedule,
    Segment,
    SegmentGraph,
    parse_actions,
)

F, B = Kind.FORWARD, Kind.BACKWARD


def segment(index: int, rank: int, *, has_backward: bool = True) -> Segment:
    return Segment(index, rank, 1.0, 2.0, has_backward)


def test_actions_print_and_parse() -> None:
    actions = (Action(F, 2, 0), Action(B, 2, 13))
    assert " ".join(map(str, actions)) == "F0@2 B13@2"
    assert parse_actions("F0@2 B13@2") == actions
    assert parse_actions("F0 B13", segment=2) == actions
    assert parse_actions("  ") == ()


@pytest.mark.parametrize("word", ["G0", "F", "F-1", "F0@", "f0", "F0,B0", "F\u0661"])
def test_a_word_that_is_no_action_is_refused(word: str) -> None:
    with pytest.raises(ScheduleError, match="write it like"):
        parse_actions(f"F0 {word}")


def test_segments_are_left_out_only_where_they_say_nothing() -> None:
    plain = Schedule.parse(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    assert plain.text(1) == "F0 B0 F1 B1"
    visits = Schedule.parse(["F0@0 F0@2 B0@2 B0@0", "F0@1 B0@1"])
    assert visits.text(0) == "F0@0 F0@2 B0@2 B0@0"
    swapped = Schedule.parse(["F0@1 B0@1", "F0@0 B0@0"])
    assert swapped.text(0) == "F0@1 B0@1"
    for schedule in (plain, visits, swapped):
        assert Schedule.parse(schedule.text(rank) for rank in range(2)) == schedule


def test_digest_is_the_same_in_every_process_and_sees_order() -> None:
    texts = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    module = "smdistributed.modelparallel.common.planning.schedule"
    code = f"from {module} import Schedule; print(Schedule.parse({texts!r}).digest())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == Schedule.parse(texts).digest()
    assert Schedule.parse(texts).digest() != Schedule.parse(reversed(texts)).digest()
    assert Schedule.parse(["F0 F1"]).digest() != Schedule.parse(["F0", "F1@0"]).digest()


def test_dependencies_of_a_graph_with_a_skip_and_a_part_without_gradient() -> None:
    graph = SegmentGraph(
        (segment(0, 0), segment(1, 1), segment(2, 1, has_backward=False), segment(3, 0)),
        (
            Edge(0, 1, 8, True),
            Edge(0, 3, 8, True),
            Edge(1, 3, 8, True),
            Edge(1, 3, 1, False),
            Edge(1, 2, 8, True),
            Edge(2, 3, 8, False),
        ),
        2,
    )
    assert graph.dependencies(2) == {
        action: tuple(parse_actions(waits))
        for m in range(2)
        for action, waits in {
            Action(F, 0, m): "",
            Action(F, 1, m): f"F{m}@0",
            Action(F, 2, m): f"F{m}@1",
            Action(F, 3, m): f"F{m}@0 F{m}@1 F{m}@2",
            Action(B, 3, m): f"F{m}@3",
            Action(B, 1, m): f"F{m}@1 B{m}@3",
            Action(B, 0, m): f"F{m}@0 B{m}@1 B{m}@3",
        }.items()
    }


@pytest.mark.parametrize(
    ("segments", "edges", "message"),
    [
        ((segment(1, 0),), (), "index 1 at position 0"),
        ((segment(0, 2),), (), "rank 2, but there are 2"),
        ((Segment(0, 0, -1.0, 1.0, True),), (), "not negative"),
        ((segment(0, 0), segment(1, 1)), (Edge(1, 0, 8, True),), "received 1 -> 0"),
        ((segment(0, 0), segment(1, 1)), (Edge(1, 1, 8, True),), "received 1 -> 1"),
        ((segment(0, 0), segment(1, 1)), (Edge(0, 2, 8, True),), "received 0 -> 2"),
        ((segment(0, 0), segment(1, 1)), (Edge(-1, 1, 8, True),), "received -1 -> 1"),
        ((segment(0, 0), segment(1, 1)), (Edge(0, 1, -8, True),), "not negative"),
    ],
)
def test_an_impossible_graph_is_refused(
    segments: tuple[Segment, ...], edges: tuple[Edge, ...], message: str
) -> None:
    with pytest.raises(PartitionError, match=message):
        SegmentGraph(segments, edges, 2)
