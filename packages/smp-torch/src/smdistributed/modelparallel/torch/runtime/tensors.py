"""What the shared code asks about PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class TorchTensors:
    """PyTorch's answers to ``common.microbatch.Tensors``."""

    def is_tensor(self, value: object) -> bool:
        """Whether ``value`` is a tensor."""
        return isinstance(value, torch.Tensor)

    def shape(self, value: Any) -> Sequence[int]:
        """The shape of a tensor."""
        return tuple(value.shape)

    def narrow(self, value: Any, axis: int, start: int, length: int) -> Any:
        """The part of a tensor from ``start``, ``length`` long along ``axis``; a view."""
        return value.narrow(axis, start, length)


TENSORS = TorchTensors()
