"""Running a function on fakes: what it writes to, and what it draws."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import (
    TorchDispatchMode,
    past_recording,
    pytree,
)
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.tensors.written import written_by


class Trial(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a function, and draws for fakes what a rank with values would draw.

    Attributes:
        has_drawn: whether something was drawn.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False
        self._written: set[int] = set()

    def has_written(self, fake: torch.Tensor) -> bool:
        """Whether the memory of a fake was written to; not every operation changes its version."""
        return storage_of(fake) in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on fakes, and once on tensors like them if it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.has_drawn = True
            with past_recording(), torch.no_grad():
                like: Any = pytree.tree_map(_ones, (args, kwargs))
                func(*like[0], **like[1])
        self._written.update(map(storage_of, written_by(func, args, kwargs)))
        return func(*args, **kwargs)


def _ones(value: Any) -> Any:
    """Returns a tensor of ones: a probability, a mean and a weight that every generator takes."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)
