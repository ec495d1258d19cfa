"""What the ranks of a run have measured together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kernels import kernel_milliseconds

import smdistributed.modelparallel.torch as smp


def slowest(own: dict[str, float]) -> dict[str, float]:
    """Returns the largest of each number over all ranks. Collective: WORLD."""
    ranks = smp.allgather(own, smp.WORLD)
    return {key: round(max(each[key] for each in ranks), 2) for key in own}


def print_kernels(step: Callable[[], Any]) -> None:
    """Profiles steps on the GPUs, and prints a line a rank. Collective: WORLD."""
    for each in smp.allgather(kernel_milliseconds(step), smp.WORLD):
        if smp.rank() == 0:
            print(json.dumps(each), flush=True)
