"""A timeline as events of the trace event format, which Perfetto and ``chrome://tracing`` read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from smdistributed.modelparallel.common.planning.schedule import Action, Kind
from smdistributed.modelparallel.common.planning.simulator import TimedAction, Timeline, Transfer

_PASSES, _COMMUNICATION = 0, 1
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENTS: "gradients of inputs",
    Kind.WEIGHT_GRADIENTS: "gradients of weights",
}

_Event = dict[str, Any]


def events_of(timeline: Timeline, scale: float) -> list[_Event]:
    """Returns the events of a timeline.

    Args:
        timeline: simulated or measured.
        scale: how many microseconds a unit of its times is.
    """
    begin = min((one.start for row in timeline.ranks for one in row), default=0.0)
    placed = {
        one.action: (rank, (one.start - begin) * scale, (one.end - begin) * scale)
        for rank, row in enumerate(timeline.ranks)
        for one in row
    }
    coming: defaultdict[Action, list[Transfer]] = defaultdict(list)
    for transfer in timeline.transfers:
        coming[transfer.target].append(transfer)
    events: list[_Event] = []
    for rank, row in enumerate(timeline.ranks):
        events += _names(rank)
        events += _passes(row, placed)
        events += _waits(row, placed, coming)
    for number, transfer in enumerate(timeline.transfers):
        events += _flow(number, transfer, placed)
    return events


_Placed = dict[Action, tuple[int, float, float]]


def _names(rank: int) -> Iterator[_Event]:
    yield _metadata("process_name", rank, name=f"rank {rank}")
    yield _metadata("process_sort_index", rank, sort_index=rank)
    for row, name in ((_PASSES, "passes"), (_COMMUNICATION, "communication")):
        yield {**_metadata("thread_name", rank, name=name), "tid": row}


def _metadata(what: str, rank: int, **values: object) -> _Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": _PASSES, "args": values}


def _passes(row: Sequence[TimedAction], placed: _Placed) -> Iterator[_Event]:
    for one in row:
        rank, start, end = placed[one.action]
        yield {
            "name": str(one.action),
            "cat": _WORDS[one.action.kind],
            "ph": "X",
            "pid": rank,
            "tid": _PASSES,
            "ts": start,
            "dur": end - start,
            "args": {
                "pass": _WORDS[one.action.kind],
                "microbatch": one.action.microbatch,
                "segment": one.action.segment,
            },
        }


def _waits(
    row: Sequence[TimedAction], placed: _Placed, coming: dict[Action, list[Transfer]]
) -> Iterator[_Event]:
    """Yields how long a rank did nothing before each pass that reads what others send."""
    before = 0.0
    for one in row:
        rank, start, end = placed[one.action]
        if (transfers := coming.get(one.action)) and start > before:
            sources = sorted({(placed[each.source][0], str(each.source)) for each in transfers})
            yield {
                "name": "wait for " + ", ".join(f"{name} of rank {r}" for r, name in sources),
                "cat": "communication",
                "ph": "X",
                "pid": rank,
                "tid": _COMMUNICATION,
                "ts": before,
                "dur": start - before,
                "args": {
                    "before": str(one.action),
                    "microbatch": one.action.microbatch,
                    "bytes": sum(each.num_bytes for each in transfers),
                },
            }
        before = end


def _flow(number: int, transfer: Transfer, placed: _Placed) -> Iterator[_Event]:
    """Yields when a rank sends something, and an arrow from there to the pass that reads it."""
    source, begin, sent = placed[transfer.source]
    target, read, _ = placed[transfer.target]
    yield {
        "name": f"send {transfer.source} to rank {target}",
        "cat": "communication",
        "ph": "i",
        "s": "t",
        "pid": source,
        "tid": _COMMUNICATION,
        "ts": sent,
        "args": {"microbatch": transfer.source.microbatch, "bytes": transfer.num_bytes},
    }
    arrow = {"name": "transfer", "cat": "transfer", "id": number, "tid": _PASSES}
    # An arrow begins within the box that it leaves: at its end the next one may begin.
    yield {**arrow, "ph": "s", "pid": source, "ts": begin + 0.999 * (sent - begin)}
    yield {**arrow, "ph": "f", "bp": "e", "pid": target, "ts": read}
