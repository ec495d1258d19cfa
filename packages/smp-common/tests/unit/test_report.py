from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import pytest

from smdistributed.modelparallel.common.planning.partitioner import Unit, partition
from smdistributed.modelparallel.common.planning.report import (
    partition_svg,
    partition_text,
    timeline_json,
    timeline_svg,
    timeline_text,
)
from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Edge,
    Kind,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import (
    TimedAction,
    Timeline,
    build_schedule,
)
from smdistributed.modelparallel.common.planning.svg import clip, number, text_width, ticks

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20


def timeline(visits: list[int], num_microbatches: int) -> Timeline:
    graph = SegmentGraph(
        tuple(Segment(index, rank, 1.0, 2.0, True) for index, rank in enumerate(visits)),
        tuple(Edge(index, index + 1, 8, True) for index in range(len(visits) - 1)),
        max(visits) + 1,
    )
    return build_schedule(graph, num_microbatches, "interleaved", len(visits) + 2)


def model() -> Unit:
    layers = tuple(Unit(f"net.{i}", 1.0, 2 * MIB, i + 1) for i in range(4))
    net = Unit("net", 0.0, 0.0, 1, children=layers)
    return Unit("", 0.0, 4 * MIB, 0, children=(Unit("embed", 0.0, 4 * MIB, 0), net))


def boxes(drawing: str) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(drawing).iter(f"{SVG}rect")
    return [rect for rect in found if rect.find(f"{SVG}title") is not None]


def test_partition_text() -> None:
    assert partition_text(partition(model(), 3, 0.5)).splitlines() == [
        "Partition assignments:",
        "  partition       memory  memory share  compute share  weighted share",
        "          0      8.0 MiB         50.0%           0.0%           25.0%",
        "             (root) (what it holds itself), embed",
        "          1      4.0 MiB         25.0%          50.0%           37.5%",
        "             net.[0-1]",
        "          2      4.0 MiB         25.0%          50.0%           37.5%",
        "             net.[2-3]",
    ]


def test_partition_text_names_what_is_empty_and_joins_only_consecutive_numbers() -> None:
    names = ["conv9", "conv10", "conv12", "dense", "dense_1", "b.0", "c.1"]
    root = Unit("", 0, 0, 0, children=tuple(Unit(n, 1, 1, i) for i, n in enumerate(names)))
    text = partition_text(partition(Unit("r", 0, 0, 0, children=(root,)), 9, 0.5))
    assert text.count("(empty)") == 2
    pinned = Unit("r", 0, 0, 0, pinned=0, children=(*root.children, Unit("x", 0, 0, 9, pinned=1)))
    assert "conv[9-10], conv12, dense, dense_1, b.0, c.1\n" in partition_text(
        partition(pinned, 2, 0.5)
    )


def test_timeline_text_is_the_staircase() -> None:
    assert timeline_text(timeline([0, 1], 3)).splitlines() == [
        "rank 0 |F0-F1-......B0----F2-B1----...B2----| 25.0% idle",
        "rank 1 |...F0-B0----F1-B1----F2-B2----......| 25.0% idle",
    ]
    assert timeline_text(timeline([0, 1, 0], 1)).splitlines() == [
        "rank 0 |F0@0-.....F0@2-B0@2------..........B0@0------| 33.3% idle",
        "rank 1 |.....F0@1-...............B0@1------..........| 66.7% idle",
    ]


def test_timeline_text_that_is_too_narrow_for_labels() -> None:
    assert timeline_text(timeline([0, 1], 3), width=12).splitlines() == [
        "rank 0 |Ff..BBFbb.BB| 25.0% idle",
        "rank 1 |.FBBfbbFBB..| 25.0% idle",
    ]


def test_timeline_text_of_nothing() -> None:
    assert timeline_text(Timeline(((), ()))) == "(nothing is executed)"


@pytest.mark.parametrize(
    "drawing",
    [
        partition_svg(partition(model(), 3, 0.5)),
        timeline_svg(timeline([0, 1, 0], 4), "a plan"),
        timeline_svg(Timeline(((), ())), "nothing"),
    ],
)
def test_drawings_stand_alone_and_fit_their_page(drawing: str) -> None:
    root = ElementTree.fromstring(drawing)
    assert drawing.count("http") == 1  # the name space, and nothing to load
    assert not list(root.iter(f"{SVG}script"))
    assert "prefers-color-scheme: dark" in drawing
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= x <= x + float(rect.attrib["width"]) <= width + 0.01
        assert 0 <= y <= y + float(rect.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        length = text_width(text.text or "", float(text.attrib["font-size"]))
        x = float(text.attrib["x"])
        before = {"start": 0.0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
        assert x - before >= -1
        assert x - before + length <= width + 1


def test_a_box_for_every_action_in_the_colour_of_its_pass() -> None:
    drawn = timeline([0, 1, 0], 4)
    found = boxes(timeline_svg(drawn, "a plan"))
    assert len(found) == 24
    assert sum("forward" in box.attrib["class"] for box in found) == 12
    # The second visit of rank 0 is shaded.
    assert sum("again" in box.attrib["class"] for box in found) == 8
    assert boxes(timeline_svg(drawn, "", in_seconds=False))[0][0].text == "F0@0: 0 to 1"
    assert boxes(timeline_svg(drawn, ""))[0][0].text == "F0@0: 0 to 1000"


def test_a_measured_timeline_begins_at_its_first_action() -> None:
    def shifted(by: float) -> Timeline:
        forward = TimedAction(Action(Kind.FORWARD, 0, 0), by, by + 0.5)
        backward = TimedAction(Action(Kind.BACKWARD, 0, 0), by + 0.75, by + 2)
        return Timeline(((forward, backward),))

    assert timeline_svg(shifted(1024.0), "run") == timeline_svg(shifted(0.0), "run")
    assert timeline_text(shifted(1024.0)) == timeline_text(shifted(0.0))


@pytest.mark.parametrize(("num_microbatches", "at_least"), [(64, 128), (180, 10)])
def test_numbers_of_many_microbatches_do_not_overlap(num_microbatches: int, at_least: int) -> None:
    drawing = timeline_svg(timeline(list(range(8)), num_microbatches), "eight ranks")
    rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for text in ElementTree.fromstring(drawing).iter(f"{SVG}text"):
        if text.attrib["class"] == "inside":
            half = text_width(text.text or "", float(text.attrib["font-size"])) / 2
            x = float(text.attrib["x"])
            rows[float(text.attrib["y"])].append((x - half, x + half))
    assert len(rows) == 8
    for row in rows.values():
        assert len(row) >= at_least
        assert all(a[1] < b[0] for a, b in itertools.pairwise(sorted(row)))


def test_texts_are_escaped() -> None:
    unit = Unit('<b> & "c" \x00', 1.0, 1.0, 0)
    title = '<i> & "d" \x01'
    drawing = partition_svg(partition(unit, 1, 0.5), title)
    root = ElementTree.fromstring(drawing)
    assert root.attrib["aria-label"] == '<i> & "d" \ufffd'
    assert [box[0].text for box in boxes(drawing)] == ['<b> & "c" \ufffd: 100.00%, 1 B']


def test_bars_are_as_long_as_shares() -> None:
    found = boxes(partition_svg(partition(model(), 3, 0.5)))
    widths = [float(box.attrib["width"]) for box in found]
    # root and embed 12.5% each, four layers 18.75% each
    assert [width / widths[0] for width in widths] == pytest.approx([1, 1, *[1.5] * 4], rel=1e-3)


def test_round_ticks() -> None:
    assert list(ticks(10, 5)) == [0, 2, 4, 6, 8, 10]
    assert list(ticks(0.7, 4)) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert list(ticks(0, 4)) == [0]


def test_clipped_names_keep_their_end() -> None:
    assert clip("transformer.h.11", 10, 200) == "transformer.h.11"
    assert clip("transformer.h.11", 10, 40) == "\u2026.h.11"
    assert clip("transformer.h.11", 10, 12) == ""


def test_numbers_are_short() -> None:
    assert [number(x) for x in (1.0, 1.256, -0.001, 0.1)] == ["1", "1.26", "0", "0.1"]


#: What the trace event format wants of each phase of an event, beside its name.
TRACE_KEYS = {
    "M": {"pid", "args"},
    "X": {"pid", "tid", "ts", "dur"},
    "i": {"pid", "tid", "ts", "s"},
    "s": {"pid", "tid", "ts", "id"},
    "f": {"pid", "tid", "ts", "id", "bp"},
}


def checked_events(text: str) -> list[dict[str, Any]]:
    """Returns the events of a trace after a look at what its format asks for."""
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        assert event.keys() >= TRACE_KEYS[event["ph"]] | {"name"}, event
        if event["ph"] == "X":
            row = event["pid"], event["tid"]
            assert event["dur"] >= 0
            assert event["ts"] >= ends.get(row, 0.0) - 1e-6, "events of a row overlap"
            ends[row] = event["ts"] + event["dur"]
    return events


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble"])
def test_timeline_json_has_each_pass_and_an_arrow_for_each_transfer(pipeline: Any) -> None:
    weights = 1.0 if pipeline == "zero_bubble" else None
    for visits, count in itertools.product(
        ([0], [0, 1], [0, 1, 2], [0, 1, 0], [0, 1, 1, 0]), (1, 4)
    ):
        segments = (
            Segment(index, rank, 1.0, 2.0, True, weight_cost=weights)
            for index, rank in enumerate(visits)
        )
        hops = [Edge(index, index + 1, 8, index != 1) for index in range(len(visits) - 1)]
        graph = SegmentGraph(tuple(segments), tuple(hops), max(visits) + 1)
        shown = build_schedule(graph, count, pipeline, 4)
        events = checked_events(timeline_json(shown, "a step", in_seconds=False))
        by_phase = defaultdict(list)
        for event in events:
            by_phase[event["ph"]].append(event)
        passes = {e["name"]: e for e in by_phase["X"] if e["tid"] == 0}
        assert passes.keys() == {str(one.action) for row in shown.ranks for one in row}
        for row in shown.ranks:
            for one in row:
                event = passes[str(one.action)]
                assert event["ts"] == pytest.approx(one.start * 1e3)
                assert event["dur"] == pytest.approx((one.end - one.start) * 1e3)
        crossing = [edge for edge in hops if visits[edge.source] != visits[edge.target]]
        num_sent = count * sum(1 + edge.has_grad for edge in crossing)
        assert len(by_phase["s"]) == len(by_phase["f"]) == len(by_phase["i"]) == num_sent
        ends = {event["id"]: event for event in by_phase["f"]}
        for begin, sent in zip(by_phase["s"], by_phase["i"], strict=True):
            end, source = ends[begin["id"]], passes[sent["name"].split()[1]]
            assert begin["pid"] == source["pid"] != end["pid"]
            assert source["ts"] < begin["ts"] < sent["ts"] <= end["ts"] + 1e-6
            assert sent["name"].endswith(f"to rank {end['pid']}")
            assert sent["args"]["bytes"] == 8


def test_timeline_json_of_nothing() -> None:
    events = checked_events(timeline_json(Timeline(((), ())), "nothing"))
    assert {event["ph"] for event in events} == {"M"}
