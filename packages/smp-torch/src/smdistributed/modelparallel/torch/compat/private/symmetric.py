"""Memory of a GPU that the GPUs of other processes read, by torch's symmetric memory."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

#: Those that there are: PyTorch's allocator does not know of their memory.
_buffers: weakref.WeakSet[SymmetricBuffer] = weakref.WeakSet()


def windows() -> list[torch.Tensor]:
    """Returns the pieces of this process that others read and write."""
    return [each.own for each in _buffers]


class SymmetricBuffer:
    """Equal pieces of memory on the GPUs of a group's ranks. Collective over the group.

    Multicast is never used, whatever the hardware has.

    Args:
        size_bytes: of a rank's piece.
        device: this process's GPU.
        group: torch's.
        timeout_seconds: of a barrier; then the GPU ends what runs on it, with an error.

    Attributes:
        own: the piece of this process, in bytes.
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
        from torch._C._distributed_c10d import _SymmetricMemory

        self._write: Any = _SymmetricMemory.stream_write_value32
        self._timeout_ms = int(timeout_seconds * 1000)
        self.own = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
        # It is cleared behind what the GPU has been given so far: before it is, no other GPU may
        # signal that it has come to a barrier, since that would be cleared too.
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self.own, group)
        #: Of each rank, where signals to it are.
        self._pads = [self._handle.get_signal_pad(rank) for rank in range(self._handle.world_size)]
        _buffers.add(self)
        #: One channel is the barrier's.
        self.num_channels = self._pads[0].numel() // len(self._pads) - 1

    def piece(self, rank: int, start_bytes: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns some numbers of a rank, as a tensor of this process's GPU."""
        found: torch.Tensor = self._handle.get_buffer(
            rank, [count], dtype, start_bytes // dtype.itemsize
        )
        return found

    def barrier(self) -> None:
        """What is started on the current stream waits until all ranks have come to it."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)

    def signal(self, rank: int, channel: int) -> None:
        """Tells a rank that all that comes before in the current stream has been done.

        The stream writes the signal itself: a kernel might have to wait for others to end.
        """
        place = len(self._pads) * (channel + 1) + self._handle.rank
        self._write(self._pads[rank], place, 1)

    def wait(self, rank: int, channel: int) -> None:
        """What comes after it in the current stream runs when a rank has given its signal."""
        self._handle.wait_signal(rank, channel=channel + 1, timeout_ms=self._timeout_ms)
