"""Compatibility: helpers that published scripts import."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.api.slot import facade, slot
from smdistributed.modelparallel.torch.model.distributed import models_of


def rmsg(message: object) -> str:
    """Returns a message that begins with the global rank of this process."""
    return f"rank {facade.rank()}: {message}"


def get_distribution_axis(parameter: torch.Tensor) -> int | None:
    """Returns the dim along which tensor parallelism splits a parameter; None: it is whole."""
    for model in models_of(slot.get()) if slot.is_filled else ():
        axis = model.split_dim(parameter)
        if axis is not None:
            return axis
    return None
