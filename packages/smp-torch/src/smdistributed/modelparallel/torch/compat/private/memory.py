"""The allocator of a GPU's memory, beyond PyTorch's public API."""

from __future__ import annotations

import contextlib
import os

import torch

_REUSE = "graph_capture_record_stream_reuse:True"


def reuse_while_capturing() -> None:
    """Lets memory that several streams have used be used again within what is captured.

    Without this each captured exchange keeps its own. What the user set stays, this included.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    # Some settings are reset where they are not named again; older PyTorch does not have this one.
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (_REUSE, given))))
