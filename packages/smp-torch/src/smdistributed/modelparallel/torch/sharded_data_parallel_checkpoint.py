"""Compatibility: one state out of the files of many ranks, without a job."""

from __future__ import annotations

import os
from typing import Any

import torch

from smdistributed.modelparallel.torch.checkpoint.merging import full_state_dict

__all__ = ["get_full_state_dict_from_sharded_data_parallel_checkpoint"]


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    folder: str | os.PathLike[str],
    tag: str | int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Returns the weights of the whole model out of a partial checkpoint, with any degrees.

    Local: it needs no ``smp.init``. Where the checkpoint has fp32 values of half-precision weights,
    these are taken.

    Shape: those of the unpartitioned model, on the CPU.

    Args:
        folder: that ``smp.save_checkpoint`` was given.
        tag: which checkpoint; None takes the newest partial one.
        dtype: of floating-point tensors.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or holds no model.

    Source: published example scripts.
    """
    return full_state_dict(folder, tag, dtype)
