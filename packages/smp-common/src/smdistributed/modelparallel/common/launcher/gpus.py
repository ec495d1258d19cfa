"""The GPUs of this host, asked without a framework: what has asked a driver must not be copied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def usable_gpus(
    environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> tuple[str, ...]:
    """Returns the GPUs that processes may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = (word.strip() for word in visible.split(","))
        return tuple(word for word in words if word not in ("", "-1"))
    found = (path.name[6:] for path in devices.glob("nvidia*"))
    return tuple(sorted((word for word in found if word.isdecimal()), key=int))
