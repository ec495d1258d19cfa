"""Running code where no mode of the script, and no draw, reaches it or is reached by it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def alone(function: Callable[[], T]) -> T:
    """Runs a function past all modes of torch, which belong to threads; draws nothing.

    The script waits for it, so it has all cores that the processes of the host leave each other:
    launchers give a process of a GPU one thread.
    """

    def run() -> T:
        with _own_cores():
            return function()

    state = torch.get_rng_state()
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()
    finally:
        torch.set_rng_state(state)


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
