"""Measuring what the memory of a rank's device holds.

How much is in use the allocator and the driver say, whatever it is for. Of that, what lies where a
tensor of a model or an optimizer does has the kind of this tensor, and the rest is called for what
it is in: tensors, captured passes, memory outside of the allocator. So the kinds add up to what is
in use, and a tensor that nobody knows is no error.
"""

from __future__ import annotations

import bisect
import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from smdistributed.modelparallel.torch.device_memory.forecast import expected
from smdistributed.modelparallel.torch.device_memory.held import Span, spans
from smdistributed.modelparallel.torch.device_memory.kinds import (
    CAPTURED,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    OUTSIDE,
    PARAMETERS,
    UNUSED,
    WINDOWS,
)
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport
from smdistributed.modelparallel.torch.runtime.capacity import capacity_of
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

#: Always told, in this order; the others where there are some.
_USUAL = (PARAMETERS, GRADIENTS, OPTIMIZER, OTHER)
_ORDER = (
    PARAMETERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    CAPTURED,
    WINDOWS,
    UNUSED,
    OUTSIDE,
)


class Region(NamedTuple):
    """A piece of memory that PyTorch's allocator has from the driver.

    Attributes:
        start, end: its addresses.
        used: bytes of it that tensors have.
        is_captured: whether it is for CUDA graphs, which keep it all.
    """

    start: int
    end: int
    used: int
    is_captured: bool


def report(runtime: TorchRuntime) -> MemoryReport:
    """Returns what the device of this process holds. Local."""
    device = runtime.device
    capacity = capacity_of(device)
    known = by_kind(spans(runtime))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kinds = on_gpu(known, _regions(device), capacity - free)
        most = torch.cuda.max_memory_allocated(device)
    else:
        kinds = {kind: sum(end - start for start, end in known[kind]) for kind in known}
        kinds[OTHER] = max(0, _resident() - sum(kinds.values()))
        most = _most_resident()
    ordered = {kind: kinds.get(kind, 0) for kind in _ORDER if kinds.get(kind) or kind in _USUAL}
    coming = {kind: size for kind, size in expected(runtime).items() if size > ordered.get(kind, 0)}
    return MemoryReport(runtime.rank, str(device), capacity, ordered, most, coming)


def by_kind(found: Iterable[Span]) -> dict[str, list[tuple[int, int]]]:
    """Returns the addresses of each kind; what several lie in belongs to the first of them."""
    taken: list[tuple[int, int]] = []  # apart from each other, in order
    kinds: dict[str, list[tuple[int, int]]] = {}
    for kind, start, end in found:
        place = bisect.bisect_left(taken, (start, start))
        if place and taken[place - 1][1] > start:
            place -= 1
        first, at, free = place, start, []
        while place < len(taken) and taken[place][0] < end:
            if taken[place][0] > at:
                free.append((at, taken[place][0]))
            at = max(at, taken[place][1])
            place += 1
        if at < end:
            free.append((at, end))
        if free:
            kinds.setdefault(kind, []).extend(free)
            taken[first:place] = sorted([*taken[first:place], *free])
    return kinds


def on_gpu(
    known: Mapping[str, Sequence[tuple[int, int]]], regions: Sequence[Region], in_use: int
) -> dict[str, int]:
    """Returns the bytes of each kind.

    Args:
        known: addresses of those that are known by their tensors.
        regions: that the allocator has, in the order of their addresses.
        in_use: of the device, for whatever.
    """
    kinds = {kind: sum(end - start for start, end in pieces) for kind, pieces in known.items()}
    starts = [region.start for region in regions]
    known_in = {True: 0, False: 0}
    known_outside = 0
    for start, end in (piece for pieces in known.values() for piece in pieces):
        place = bisect.bisect_right(starts, start) - 1
        if place >= 0 and start < regions[place].end:
            known_in[regions[place].is_captured] += end - start
        else:
            known_outside += end - start
    captured = sum(each.end - each.start for each in regions if each.is_captured)
    plain = [each for each in regions if not each.is_captured]
    used = sum(each.used for each in plain)
    reserved = sum(each.end - each.start for each in plain)
    rest = {
        OTHER: used - known_in[False],
        CAPTURED: captured - known_in[True],
        UNUSED: reserved - used,
        OUTSIDE: in_use - captured - reserved - known_outside,
    }
    return kinds | {kind: max(0, size) for kind, size in rest.items()}


def _regions(device: torch.device) -> list[Region]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return sorted(
        Region(
            each["address"],
            each["address"] + each["total_size"],
            each["allocated_size"],
            tuple(each["segment_pool_id"]) != (0, 0),
        )
        for each in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if each["device"] == index
    )


def _resident() -> int:
    """Returns the bytes that a process has in the memory of its host."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # a system without it tells the most that there was
        return _most_resident()


def _most_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
