"""Torch's process groups, which carry tensors of the host and of GPUs alike."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


def backends() -> str:
    """Returns the backends of a group, for each type of device that is here."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def new_group(members: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Makes a group, also where the script has made that of the world for GPUs alone.

    Collective: WORLD.

    Args:
        members: global ranks.
        timeout: torch does not take over that of the world.
    """
    made: dist.ProcessGroup = dist.new_group(list(members), timeout=timeout, backend=backends())
    return made


def serves_host(group: dist.ProcessGroup) -> bool:
    """Tells whether a group carries tensors of the host."""
    config: str = dist.get_backend_config(group)
    return "cpu:" in config
