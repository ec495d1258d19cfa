"""What the ranks of a run have measured together."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

from kernels import kernel_milliseconds

import smdistributed.modelparallel.torch as smp


def slowest(own: dict[str, float]) -> dict[str, float]:
    """Returns the largest of each number over all ranks. Collective: WORLD."""
    ranks = smp.allgather(own, smp.WORLD)
    return {key: round(max(each[key] for each in ranks), 2) for key in own}


def memory_gib() -> dict[str, float]:
    """Returns what the fullest rank's device holds, by kind, and what its tensors took at most.

    Collective: WORLD.
    """
    reports = smp.allgather(smp.memory(), smp.WORLD)
    fullest = max(reports, key=lambda each: (each.most, each.total))
    sizes = {**fullest.kinds, "in all": fullest.total, "most of tensors": fullest.most}
    return {kind: round(size / 2**30, 2) for kind, size in sizes.items()}


def print_kernels(step: Callable[[], Any]) -> None:
    """Profiles steps on the GPUs, and prints a line a rank. Collective: WORLD."""
    for each in smp.allgather(kernel_milliseconds(step), smp.WORLD):
        if smp.rank() == 0:
            print(json.dumps(each), flush=True)


class Prediction(logging.Handler):
    """Keeps what the library has said that it expects of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.milliseconds: float | None = None
        library = logging.getLogger("smdistributed")
        library.setLevel(logging.INFO)
        library.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Looks for it in a line of the log."""
        if record.levelno >= logging.WARNING:
            print(record.getMessage(), flush=True)
        if found := re.search(r"predicted to take ([\d.]+) ms", record.getMessage()):
            self.milliseconds = float(found[1])
