"""What a process holds, to see that a long run holds no more than a short one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Pools make threads, and allocators take memory, when they first need them.
_FEW = 4
_FEW_BYTES = 8 * 2**20


class Footprint(NamedTuple):
    """What a process holds at one time.

    Attributes:
        threads: of all libraries.
        files: descriptors that are open.
        objects: that Python's garbage collector follows.
        resident_bytes: of memory.
    """

    threads: int
    files: int
    objects: int
    resident_bytes: int


def footprint() -> Footprint:
    """Returns what this process holds now, without what nothing refers to any more."""
    gc.collect()
    return Footprint(
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        len(gc.get_objects()),
        int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
    )


def check_long_run(step: Callable[[], object], num_first: int, num_steps: int) -> None:
    """Asserts that a process holds after many steps what it held after the first of them.

    Args:
        step: makes one step.
        num_first: steps until everything is there that steps make once.
        num_steps: steps in all.
    """
    for _ in range(num_first):
        step()
    before = footprint()
    for _ in range(num_steps - num_first):
        step()
    after = footprint()
    # Less than an object in two steps is none a step.
    most = Footprint(_FEW, _FEW, (num_steps - num_first) // 2, _FEW_BYTES)
    grown = {
        name: (old, new)
        for name, old, new, few in zip(Footprint._fields, before, after, most, strict=True)
        if new > old + few
    }
    assert not grown, f"held after {num_first} and {num_steps} steps: {grown}"
