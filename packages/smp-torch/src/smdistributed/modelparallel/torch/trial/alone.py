"""Running code where no mode of the script, and no draw, reaches it or is reached by it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def alone(function: Callable[[], T]) -> T:
    """Runs a function past all modes of torch, which belong to threads; draws nothing."""
    state = torch.get_rng_state()
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()
    finally:
        torch.set_rng_state(state)
