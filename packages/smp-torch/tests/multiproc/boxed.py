"""Pipelines whose ranks lay messages into each other's memory, on the CPU into files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from shared_files import FileMemory
from world import PRELOAD, start, without_fork

from smdistributed.modelparallel.common.testing import World
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.runtime import runtime


def share_memory() -> None:
    """Has the ranks of pipelines share memory; called before ``smp.init``."""
    if not torch.cuda.is_available():  # GPUs have memory of their own
        runtime.readable_memory = _by_files


def start_boxed(config: Mapping[str, object]) -> Callable[[], object]:
    """Starts the library on a rank; see ``world.start``."""
    share_memory()
    return start(config)


def _by_files(_group: object, collectives: Collectives, *_: object) -> Any:
    """Stands for ``readable_memory``. Collective: the ranks of ``collectives``."""

    def make(size_bytes: int) -> FileMemory:
        own = tempfile.mkdtemp(prefix="smp-test-", dir="/dev/shm")
        common = Path(collectives.compare_texts(own)[0])
        memory = FileMemory(size_bytes, common, collectives)
        memory.barrier()  # all have mapped what is removed here
        shutil.rmtree(own)
        return memory

    return make


def boxed(degree: int, **config: object) -> World:
    """Returns the world of one pipeline; its ranks are copies of one process."""
    given = {"pipeline_parallel_degree": degree, "microbatches": 4, **config}
    launcher = without_fork(degree, "fork")
    args = (dict(sorted(given.items())),)
    return World(degree, start_boxed, args, launcher=launcher, preload=PRELOAD)
