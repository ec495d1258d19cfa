"""Memory of a GPU that the GPUs of other processes read, by torch's symmetric memory."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


class SymmetricBuffer:
    """Equal pieces of memory on the GPUs of a group's ranks. Collective over the group.

    Multicast is never used, whatever the hardware has.

    Args:
        size_bytes: of a rank's piece.
        device: this process's GPU.
        group: torch's.
        timeout_seconds: of a barrier; then the GPU ends what runs on it, with an error.
    """

    def __init__(
        self,
        size_bytes: int,
        device: torch.device,
        group: dist.ProcessGroup,
        timeout_seconds: float,
    ) -> None:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed._symmetric_memory as symmetric

        self._timeout_ms = int(timeout_seconds * 1000)
        self._own = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
        # It is cleared behind what the GPU has been given so far: before it is, no other GPU may
        # signal that it has come to a barrier, since that would be cleared too.
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._own, group)

    def piece(self, rank: int, start_bytes: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns some numbers of a rank, as a tensor of this process's GPU."""
        found: torch.Tensor = self._handle.get_buffer(
            rank, [count], dtype, start_bytes // dtype.itemsize
        )
        return found

    def barrier(self) -> None:
        """What is started on the current stream waits until all ranks have come to it."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
