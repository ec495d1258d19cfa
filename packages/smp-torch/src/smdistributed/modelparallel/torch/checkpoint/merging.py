"""The weights of a partial checkpoint as one state, without a job.

Source: published example scripts.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.torch.checkpoint.files import CheckpointFiles
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY
from smdistributed.modelparallel.torch.optimizer.state import MASTER


def full_state_dict(
    folder: str | os.PathLike[str], tag: str | int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """See ``sharded_data_parallel_checkpoint``."""
    directory = CheckpointDirectory(folder, rank=0, gather=lambda obj: [obj])
    checkpoint = directory.resolve(tag, partial=True)
    files = CheckpointFiles(checkpoint)
    stored = files.layout()
    models, optimizers = files.models(stored), files.optimizers(stored)
    if not models:
        raise CheckpointError(
            f"checkpoint '{checkpoint.tag}' in {directory.path} holds no model: it was saved "
            "without one."
        )
    state = stored.assemble(models)
    del state[PARTIAL_KEY]
    optimizer = stored.assemble_optimizer(optimizers) if optimizers else {"state": {}}
    masters = {
        _place(state[name]): values[MASTER]
        for name, values in optimizer["state"].items()
        if MASTER in values and name in state
    }
    cast: dict[Any, Any] = {}  # once, so that tied ones share memory as before
    for value in state.values():
        if isinstance(value, torch.Tensor):
            cast.setdefault(_place(value), _value(value, masters, dtype))
    return {
        name: cast[_place(value)] if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    """Returns what tied tensors of one file have in common."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _value(
    value: torch.Tensor, masters: dict[Any, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return masters.get(_place(value), value).to(dtype)
