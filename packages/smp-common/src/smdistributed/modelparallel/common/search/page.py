"""A plan as a page: its lines, step time against memory, what ranks hold, and the best step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

from smdistributed.modelparallel.common.planning.report import timeline_svg
from smdistributed.modelparallel.common.planning.simulator import Timeline
from smdistributed.modelparallel.common.planning.svg import Drawing, ticks
from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.common.search.tables import gib

_GIB = 1 << 30
_WIDTH, _HEIGHT, _LEFT, _SIZE = 720.0, 260.0, 60.0, 12.0
_ROW, _BAR = 26.0, 18.0
#: By kind of memory, how its part of a bar looks.
_CLASSES = {
    "parameters": "forward",
    "gradients": "backward",
    "optimizer": "weights",
    "activations": "memory",
    "transfers": "compute again",
    "reserve": "track",
}


def page(
    table: str,
    points: Sequence[tuple[float, float]],
    memory: Sequence[RankMemory],
    limit_bytes: float,
    timeline: Timeline | None,
) -> str:
    """Returns a page of HTML that stands for itself.

    Args:
        table: the plan as text.
        points: of each line, the seconds of a step and the bytes of its fullest rank.
        memory: of each rank of the best line's pipeline.
        limit_bytes: that a device has.
        timeline: of the best line; None where it has one partition.
    """
    pictures = [("Step time against memory, by line", _scatter(points, limit_bytes))]
    pictures.append(
        ("What each partition of line 1 holds at its fullest", _bars(memory, limit_bytes))
    )
    if timeline is not None:
        pictures.append(("The step of line 1, as simulated", timeline_svg(timeline, "Line 1")))
    body = "\n".join(f"<h2>{escape(title)}</h2>\n{picture}" for title, picture in pictures)
    head = '<meta charset="utf-8"><title>Plan</title><style>pre { white-space: pre-wrap; }</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n<h1>Plan</h1>\n'
        f"<pre>{escape(table)}</pre>\n{body}\n</body></html>\n"
    )


def _scatter(points: Sequence[tuple[float, float]], limit_bytes: float) -> str:
    """Returns a picture of lines; those that no other beats in both are in the stronger colour."""
    drawing = Drawing("Step time against memory")
    slowest = max(seconds for seconds, _ in points)
    bottom, width = _HEIGHT - 40, _WIDTH - _LEFT - 20

    def x(num_bytes: float) -> float:
        return _LEFT + width * num_bytes / limit_bytes

    def y(seconds: float) -> float:
        return bottom - (bottom - 20) * seconds / slowest

    drawing.line(_LEFT, bottom, _LEFT + width, bottom, "rule")
    drawing.line(_LEFT, 20, _LEFT, bottom, "rule")
    for num_gib in ticks(limit_bytes / _GIB, 8):
        drawing.text(x(num_gib * _GIB), bottom + 16, f"{num_gib:g}", _SIZE, "minor", "middle")
    for milliseconds in ticks(1e3 * slowest, 5):
        drawing.text(
            _LEFT - 6, y(milliseconds / 1e3) + 4, f"{milliseconds:g}", _SIZE, "minor", "end"
        )
    drawing.text(_LEFT + width, bottom + 32, "GiB of the fullest rank", _SIZE, "minor", "end")
    drawing.text(_LEFT, 12, "ms a step", _SIZE, "minor", "middle")
    for place, (seconds, num_bytes) in enumerate(points, 1):
        is_beaten = any(
            s <= seconds and b <= num_bytes and (s, b) != (seconds, num_bytes) for s, b in points
        )
        hint = f"line {place}: {1e3 * seconds:.1f} ms, {gib(num_bytes)} GiB"
        drawing.rect(
            x(num_bytes) - 4, y(seconds) - 4, 8, 8, "track" if is_beaten else "compute", hint
        )
        drawing.text(x(num_bytes) + 6, y(seconds) + 4, str(place), _SIZE, "minor")
    return drawing.document(_WIDTH, _HEIGHT)


def _bars(memory: Sequence[RankMemory], limit_bytes: float) -> str:
    """Returns bars of bytes by kind, a rank each, and what a device has as a line."""
    drawing = Drawing("Memory of each partition")
    width = _WIDTH - _LEFT - 20
    for rank, held in enumerate(memory):
        top, at = 30 + _ROW * rank, _LEFT
        drawing.text(_LEFT - 6, top + _BAR - 5, str(rank), _SIZE, "", "end")
        for kind, num_bytes in dataclasses.asdict(held).items():
            length = width * num_bytes / limit_bytes
            drawing.rect(
                at, top, length, _BAR, f"box {_CLASSES[kind]}", f"{gib(num_bytes)} GiB {kind}"
            )
            at += length
    bottom = 30 + _ROW * len(memory)
    drawing.line(_LEFT + width, 24, _LEFT + width, bottom, "even")
    drawing.text(_LEFT + width, 18, f"{gib(limit_bytes)} GiB", _SIZE, "minor", "end")
    at = _LEFT
    for kind, names in _CLASSES.items():
        drawing.rect(at, bottom + 10, 12, 12, f"box {names}")
        drawing.text(at + 16, bottom + 20, kind, _SIZE)
        at += 105
    return drawing.document(_WIDTH, bottom + 34)
