"""Memory and who keeps it, beyond PyTorch's public API."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

_REUSE = "graph_capture_record_stream_reuse:{}"


def reuse_while_capturing(*, is_on: bool = True) -> None:
    """Lets memory that several streams have used be used again within what is captured.

    Without this each captured exchange keeps its own. With it the process ends where autograd frees
    such memory after a capture has failed, and a capture that is no good does not end: the
    allocator asks first how its streams came together. What the user set stays, this included.

    Args:
        is_on: whether it is.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    # Some settings are reset where they are not named again; older PyTorch does not have this one.
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        torch._C._accelerator_setAllocatorSettings(
            ",".join(filter(None, (_REUSE.format(is_on), given)))
        )


def end_allocating(device: torch.device, pool: Any) -> None:
    """Ends that memory is of a pool, which a capture has begun.

    Raises:
        RuntimeError: it has ended already.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor at the place of one, without keeping its memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    memory = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, count * tensor.element_size()
    )
    return tensor.new_empty(0).set_(memory, 0, tensor.shape, tensor.stride())
