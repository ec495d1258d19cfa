"""What is said of other settings after passes were timed is what a simulation says of them."""

from __future__ import annotations

from unittest import mock

import pytest

from smdistributed.modelparallel.common.planning.schedule import Edge, Segment, SegmentGraph
from smdistributed.modelparallel.torch.planning.other_settings import faster_settings

MICROBATCHES = 8


def chain(num_ranks: int, *, halves: bool = False, timed: bool = False) -> SegmentGraph:
    """A model whose passes take 10, 12 and 8 seconds on each of two ranks."""
    assert timed
    later = 8.0 if halves else 0.0
    segments = (
        Segment(rank, rank, 10.0, 20.0 - later, True, weight_cost=later or None)
        for rank in range(num_ranks)
    )
    return SegmentGraph(tuple(segments), (Edge(0, 1, 1, has_grad=True),), num_ranks)


def found(pipeline: str, seconds: float) -> dict[str, float]:
    plan = mock.Mock(segment_graph=chain)
    return dict(faster_settings(plan, 2, MICROBATCHES, pipeline, 4, seconds))  # type: ignore[arg-type]


def test_smaller_microbatches_and_the_other_kind_of_schedule_are_tried() -> None:
    # Nine passes of 30 follow each other where ranks have eight, and 17 halves of these.
    settings = found("interleaved", 9 * 30.0)
    assert list(settings) == ["pipeline='zero_bubble'", "microbatches=16, at best"]
    assert settings["microbatches=16, at best"] == pytest.approx(17 * 15.0, rel=0.01)
    # A rank has 240 to do, and the first microbatch takes 10 to the second one.
    assert settings["pipeline='zero_bubble'"] == pytest.approx(250.0, rel=0.03)


def test_what_a_job_tries_by_itself_and_what_gains_nothing_is_not_said() -> None:
    assert list(found("auto", 252.0)) == ["microbatches=16, at best"]
    assert found("auto", 240.0) == {}
