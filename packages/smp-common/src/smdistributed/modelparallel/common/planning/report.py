"""The partition of a model and the timeline of its pipeline, as text, SVG and trace events.

The output depends on the arguments alone, so that it can be compared and kept under version
control.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence

from smdistributed.modelparallel.common.planning.partitioner import Assignment, PlacedUnit
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.planning.simulator import TimedAction, Timeline
from smdistributed.modelparallel.common.planning.svg import Drawing, clip, number, text_width, ticks
from smdistributed.modelparallel.common.planning.trace_events import events_of

_MARGIN = 16.0
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<digits>0|[1-9][0-9]*)")

#: How the passes of each kind are drawn, and what the legend calls them.
_BOXES = {
    Kind.FORWARD: "box forward",
    Kind.BACKWARD: "box backward",
    Kind.INPUT_GRADIENTS: "box backward",
    Kind.WEIGHT_GRADIENTS: "box weights",
}
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT_GRADIENTS: "gradients of weights",
}


def partition_text(assignment: Assignment) -> str:
    """The partitions with their units and their shares of memory and computation.

    Source: model-parallel-core-features.md, Automated Model Splitting with PyTorch
    """
    lines = [
        "Partition assignments:",
        "  partition       memory  memory share  compute share  weighted share",
    ]
    for index, units in enumerate(_held(assignment)):
        lines.append(
            f"  {index:>9}  {_bytes(sum(unit.memory for unit in units)):>11}"
            f"  {assignment.memory_shares[index]:>12.1%}"
            f"  {assignment.compute_shares[index]:>13.1%}  {assignment.costs[index]:>14.1%}"
        )
        lines += textwrap.wrap(
            ", ".join(_unit_ranges(units)) or "(empty)",
            width=100,
            initial_indent=" " * 13,
            subsequent_indent=" " * 13,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def partition_svg(assignment: Assignment, title: str = "Partition assignments") -> str:
    """One bar a partition, made of its units; lengths are weighted shares of the model."""
    drawing = Drawing(title)
    left, bar_width, row_height, bar_height = 104.0, 760.0, 50.0, 24.0
    notes = [
        f"{assignment.costs[index]:.1%}, {_bytes(sum(unit.memory for unit in units))}"
        for index, units in enumerate(_held(assignment))
    ]
    right = max(text_width(note, 12) for note in notes) + 2 * _MARGIN
    shares = (*assignment.costs, *assignment.memory_shares, *assignment.compute_shares)
    scale = bar_width / (max(shares) or 1.0)
    drawing.text(_MARGIN, 28, title, 16)
    legend_x = _MARGIN
    for names, words in (
        ("box forward", "units, by weighted share"),
        ("memory", "share of memory"),
        ("compute", "share of computation"),
    ):
        legend_x = _legend(drawing, legend_x, 40, names, words)
    even_x = left + scale / assignment.num_partitions
    drawing.line(legend_x, 46, legend_x + 20, 46, "even")
    drawing.text(legend_x + 26, 50, "even share", 12, "minor")
    top = 72.0
    memory = sum(unit.memory for unit in assignment.placed)
    compute = sum(unit.compute for unit in assignment.placed)
    for index, units in enumerate(_held(assignment)):
        y = top + index * row_height
        drawing.text(left - 12, y + 17, f"partition {index}", 12, anchor="end")
        x = left
        for place, unit in enumerate(units):
            share = assignment.memory_weight * (unit.memory / memory if memory else 0.0)
            share += (1 - assignment.memory_weight) * (unit.compute / compute if compute else 0.0)
            width = share * scale
            name = unit.name or "(root)"
            drawing.rect(
                x,
                y,
                width,
                bar_height,
                "box forward again" if place % 2 else "box forward",
                f"{name}: {share:.2%}, {_bytes(unit.memory)}",
            )
            shown = clip(name, 10, width - 6)
            if shown:
                drawing.text(x + width / 2, y + 16, shown, 10, "inside", "middle")
            x += width
        drawing.text(left + bar_width + 12, y + 17, notes[index], 12, "minor")
        memory_width = assignment.memory_shares[index] * scale
        drawing.rect(left, y + bar_height + 3, memory_width, 4, "memory")
        compute_width = assignment.compute_shares[index] * scale
        drawing.rect(left, y + bar_height + 9, compute_width, 4, "compute")
    bottom = top + assignment.num_partitions * row_height
    drawing.line(even_x, top - 6, even_x, bottom - 8, "even")
    return drawing.document(left + bar_width + right, bottom + _MARGIN)


def timeline_text(timeline: Timeline, width: int = 120) -> str:
    """One line a rank, time from left to right: ``F0-B0---`` is busy, dots are idle.

    Columns are as narrow as the labels allow. Where that takes more than ``width`` columns, an
    action is its letter only, small for every other microbatch: ``FfFfBBbb``.
    """
    if not timeline.makespan:
        return "(nothing is executed)"
    timed = [one for row in timeline.ranks for one in row if one.end > one.start]
    begin = min(one.start for row in timeline.ranks for one in row)
    with_segment = any(_visits(timeline).values())
    letters = max((len(_label(one, with_segment)) + 1) / (one.end - one.start) for one in timed)
    fits = round(letters * timeline.makespan) <= width
    scale = letters if fits else width / timeline.makespan
    columns = round(timeline.makespan * scale)
    lines = []
    for rank, row in enumerate(timeline.ranks):
        cells = ["."] * columns
        for one in row:
            first, last = round((one.start - begin) * scale), round((one.end - begin) * scale)
            letter = str(one.action.kind)
            letter = letter.lower() if one.action.microbatch % 2 else letter
            text = _label(one, with_segment).ljust(last - first, "-")
            cells[first:last] = text[: last - first] if fits else letter * (last - first)
        name = str(rank).ljust(len(str(len(timeline.ranks) - 1)))
        lines.append(f"rank {name} |{''.join(cells)}| {timeline.bubble_fractions[rank]:.1%} idle")
    return "\n".join(lines)


def timeline_svg(timeline: Timeline, title: str, *, in_seconds: bool = True) -> str:
    """One row a rank, a box for every pass with its microbatch where it fits, and a time axis.

    Args:
        timeline: simulated or measured.
        title: drawn above.
        in_seconds: times are seconds, and the axis shows milliseconds; otherwise the axis shows
            the times as they are.
    """
    drawing = Drawing(title)
    left, row_height, bar_height, size = 72.0, 32.0, 24.0, 9.0
    right = text_width("100.0% idle", 12) + 2 * _MARGIN
    actions = [one for rank in timeline.ranks for one in rank]
    begin = min((one.start for one in actions), default=0.0)
    plot_width = _plot_width(timeline, size)
    scale = plot_width / timeline.makespan if timeline.makespan else 0.0
    visits = _visits(timeline)
    drawing.text(_MARGIN, 28, title, 16)
    legend_x = _MARGIN
    kinds = {one.action.kind for one in actions} | {Kind.FORWARD, Kind.BACKWARD}
    legend = [(_BOXES[kind], words) for kind, words in _WORDS.items() if kind in kinds]
    if any(visits.values()):
        legend += [("box forward again", "forward, visited again")]
        legend += [("box backward again", "backward, visited again")]
    for names, words in [*legend, ("track", "idle")]:
        legend_x = _legend(drawing, legend_x, 40, names, words)
    drawing.text(legend_x, 50, f"{timeline.bubble_fraction:.1%} idle over all ranks", 12, "minor")
    top = 68.0
    factor = 1e3 if in_seconds else 1.0
    for rank, row in enumerate(timeline.ranks):
        y = top + rank * row_height
        drawing.text(left - 12, y + 17, f"rank {rank}", 12, anchor="end")
        drawing.rect(left, y, plot_width, bar_height, "track")
        for one in row:
            x, width = left + (one.start - begin) * scale, (one.end - one.start) * scale
            names = _BOXES[one.action.kind]
            again = " again" if visits[one.action.segment] % 2 else ""
            times = " to ".join(number((time - begin) * factor) for time in (one.start, one.end))
            drawing.rect(x, y, width, bar_height, names + again, f"{one.action}: {times}")
            microbatch = str(one.action.microbatch)
            if text_width(microbatch, size) + 3 <= width:
                drawing.text(x + width / 2, y + 15.5, microbatch, size, "inside", "middle")
        idle = f"{timeline.bubble_fractions[rank]:.1%} idle"
        drawing.text(left + plot_width + 10, y + 17, idle, 12, "minor")
    axis = top + len(timeline.ranks) * row_height
    drawing.line(left, axis, left + plot_width, axis, "rule")
    for tick in ticks(timeline.makespan * factor, max(4, int(plot_width / 120))):
        x = left + tick / factor * scale
        drawing.line(x, axis, x, axis + 5, "rule")
        drawing.text(x, axis + 18, f"{tick:g}", 11, "minor", "middle")
    unit = "ms" if in_seconds else "time"
    drawing.text(left + plot_width + right - _MARGIN, axis + 18, unit, 11, "minor", "end")
    return drawing.document(left + plot_width + right, axis + 18 + _MARGIN)


def timeline_json(timeline: Timeline, title: str, *, in_seconds: bool = True) -> str:
    """The trace event format, which Perfetto and ``chrome://tracing`` open.

    A rank is a process, with a row of passes and one of communication: when it sends, and how long
    it waits for what its next pass reads. An arrow leads from the pass that makes something to the
    one on another rank that reads it.

    Args:
        timeline: simulated or measured.
        title: kept with it.
        in_seconds: times are seconds; otherwise a unit of theirs is shown as a millisecond.
    """
    return json.dumps(
        {
            "displayTimeUnit": "ms",
            "otherData": {"title": title},
            "traceEvents": events_of(timeline, 1e6 if in_seconds else 1e3),
        },
        separators=(",", ":"),
    )


def _held(assignment: Assignment) -> list[list[PlacedUnit]]:
    """The units of every partition, without split containers that hold nothing themselves."""
    held: list[list[PlacedUnit]] = [[] for _ in range(assignment.num_partitions)]
    for unit in assignment.placed:
        if not unit.is_split or unit.memory or unit.compute:
            held[unit.partition].append(unit)
    return held


def _unit_ranges(units: Sequence[PlacedUnit]) -> list[str]:
    """Names, with consecutive numbers joined: ``h.0, h.1, h.2`` becomes ``h.[0-2]``."""
    runs: list[tuple[str, int, int]] = []
    for unit in units:
        name = unit.name or "(root)"
        if unit.is_split:
            name += " (what it holds itself)"
        match = _NUMBERED.fullmatch(name)
        stem, digits = (match["stem"], int(match["digits"])) if match else (name, -1)
        if digits > 0 and runs and runs[-1][::2] == (stem, digits - 1):
            runs[-1] = (stem, runs[-1][1], digits)
        else:
            runs.append((stem, digits, digits))
    return [
        stem if last < 0 else f"{stem}[{first}-{last}]" if last > first else f"{stem}{last}"
        for stem, first, last in runs
    ]


def _bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _visits(timeline: Timeline) -> dict[int, int]:
    """For every segment, how many earlier ones its rank has."""
    visits = {}
    for row in timeline.ranks:
        for place, segment in enumerate(sorted({one.action.segment for one in row})):
            visits[segment] = place
    return visits


def _plot_width(timeline: Timeline, size: float) -> float:
    """Wide enough for the numbers of the actions that take most of the time, within reason."""
    actions = [one for row in timeline.ranks for one in row if one.end > one.start]
    left = 0.1 * sum(one.end - one.start for one in actions)
    for one in sorted(actions, key=lambda one: one.end - one.start):
        left -= one.end - one.start
        if left < 0:
            text = 1.4 * text_width(str(one.action.microbatch), size)
            needed = text * timeline.makespan / (one.end - one.start)
            return min(3200.0, max(720.0, needed))
    return 720.0


def _legend(drawing: Drawing, x: float, y: float, names: str, words: str) -> float:
    """Draws one entry and returns where the next one begins."""
    drawing.rect(x, y, 12, 12, names)
    drawing.text(x + 18, y + 10, words, 12, "minor")
    return x + 18 + text_width(words, 12) + _MARGIN


def _label(one: TimedAction, with_segment: bool) -> str:
    return str(one.action) if with_segment else f"{one.action.kind}{one.action.microbatch}"
