"""What the shared code asks about PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.torch.tensors.nested import take_apart


class TorchTensors:
    """PyTorch's answers to ``common.microbatch.Tensors``."""

    knows_shapes = True

    def is_tensor(self, value: object) -> bool:
        """Whether ``value`` is a tensor."""
        return isinstance(value, torch.Tensor)

    def shape(self, value: Any) -> Sequence[int]:
        """The shape of a tensor."""
        return tuple(value.shape)

    def narrow(self, value: Any, axis: int, start: int, length: int) -> Any:
        """The part of a tensor from ``start``, ``length`` long along ``axis``.

        A view; of a sparse tensor, which has none, a copy.
        """
        if value.layout is not torch.strided:
            return value.narrow_copy(axis, start, length)
        return value.narrow(axis, start, length)

    def take_apart(self, value: object) -> Container | None:
        """The parts of a container; None for everything else."""
        return take_apart(value)

    def is_state(self, value: object) -> bool:
        """Whether ``value`` is a parameter, or what has or updates some."""
        return isinstance(value, torch.nn.Parameter | torch.nn.Module | torch.optim.Optimizer)


TENSORS = TorchTensors()
