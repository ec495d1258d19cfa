"""Running code where nothing of the script reaches it or is left behind: no mode, draw or state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import nn

from smdistributed.modelparallel.torch.state.python_random import python_random_kept
from smdistributed.modelparallel.torch.state.snapshot import Snapshot

T = TypeVar("T")


def alone(function: Callable[[], T], modules: Iterable[nn.Module] = ()) -> T:
    """Runs a function past all modes of torch, which belong to threads; draws nothing.

    The script waits for it, so it has all cores that the processes of the host leave each other:
    launchers give a process of a GPU one thread.

    Args:
        function: to run.
        modules: whose code it runs. What that keeps, as in a table of its class, is put back.

    Raises:
        UnsupportedError: that cannot be.
    """

    def run() -> T:
        with _own_cores():
            return function()

    before = Snapshot(modules)
    state = torch.get_rng_state()
    try:
        with python_random_kept(), ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()
    finally:
        torch.set_rng_state(state)
        before.note_changes()
        before.put_all_back()


@contextlib.contextmanager
def _own_cores() -> Iterator[None]:
    before, processes = torch.get_num_threads(), os.environ.get("LOCAL_WORLD_SIZE")
    if processes is not None:
        own = len(os.sched_getaffinity(0)) // int(processes)
        torch.set_num_threads(max(before, own))
    try:
        yield
    finally:
        torch.set_num_threads(before)
