"""Drawing random numbers for tensors that are not here, so that generators stand alike."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import (
    TorchDispatchMode,
    past_recording,
    pytree,
)


class DrawingAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws for fakes what a rank with values would draw.

    Attributes:
        has_drawn: whether something was drawn.
    """

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on fakes, and once on tensors like them if it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.has_drawn = True
            with past_recording(), torch.no_grad():
                like: Any = pytree.tree_map(_ones, (args, kwargs))
                func(*like[0], **like[1])
        return func(*args, **kwargs)


def _ones(value: Any) -> Any:
    """Returns a tensor of ones: a probability, a mean and a weight that every generator takes."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)
