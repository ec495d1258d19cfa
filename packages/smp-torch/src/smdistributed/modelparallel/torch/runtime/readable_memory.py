"""Memory of GPUs that all ranks of a group read and write, where they can."""

from __future__ import annotations

import functools
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.collectives.symmetric_memory import (
    MakeMemory,
    SymmetricMemory,
    why_not,
)
from smdistributed.modelparallel.torch.compat.private.symmetric import SymmetricBuffer

logger = logging.getLogger(__name__)

#: ``0`` has GPUs exchange tensors by NCCL even where they could read each other's memory.
COPY_ENGINE_VARIABLE = "SMP_COPY_ENGINE"


def readable_memory(
    group: dist.ProcessGroup,
    collectives: Collectives,
    device: torch.device,
    host: str,
    timeout: timedelta,
    what: str,
) -> MakeMemory | None:
    """Returns what makes memory that all ranks of a group use; None where they cannot.

    It is tried. Collective: the group; each rank gets the same answer.

    Args:
        group: torch's.
        collectives: between its ranks.
        device: of this process.
        host: that it is on; empty if that is unknown.
        timeout: of what ranks wait for.
        what: who exchanges what, for the log.
    """
    if device.type != "cuda" or collectives.size == 1:
        return None

    def make(size_bytes: int) -> SymmetricMemory:
        return SymmetricBuffer(size_bytes, device, group, timeout.total_seconds())

    synchronize = functools.partial(torch.cuda.synchronize, device)
    reason = why_not(make, collectives, _place(host, device), synchronize)
    if collectives.rank == 0:
        how = f"NCCL: {reason}" if reason else "copies from each other's memory"
        logger.info("%s by %s.", what, how)
    return None if reason else make


def _place(host: str, device: torch.device) -> str:
    """Returns what names a host and a GPU; empty if memory is not to be read by others."""
    if not host or os.environ.get(COPY_ENGINE_VARIABLE) == "0":
        return ""
    return f"{host.replace(' ', '_')} {torch.cuda.get_device_properties(device).uuid}"
