"""The state of the random generators of one process, to continue from.

Between steps the library itself keeps none: the random numbers of a step follow from one draw of
torch's generator on the host (see ``random_streams``).
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the state of torch's generators, Python's, and NumPy's if it is imported.

    It holds nothing but tensors and plain values, so that it can be loaded without trust.
    """
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Puts the generators back into a captured state, as far as it and this process have them."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
