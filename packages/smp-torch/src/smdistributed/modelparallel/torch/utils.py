"""Compatibility: helpers that published scripts import."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.api.slot import facade


def rmsg(message: object) -> str:
    """Returns a message that begins with the global rank of this process."""
    return f"rank {facade.rank()}: {message}"


def get_distribution_axis(parameter: torch.Tensor) -> int | None:
    """Returns the dim along which tensor parallelism splits a parameter; None: it is whole."""
    return None
