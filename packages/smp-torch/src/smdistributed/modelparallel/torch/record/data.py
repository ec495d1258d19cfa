"""An assignment to ``.data`` of a parameter, as a write: it keeps its memory, which ranks know."""

from __future__ import annotations

from typing import Any

import torch

_TENSOR: Any = torch.Tensor
#: What ``parameter.data = x`` calls.
SETTING_DATA = _TENSOR.data.__set__


def put_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor the numbers of another one of its shape and type.

    Args:
        tensor: a parameter or a buffer.
        data: that code has assigned to its ``.data``.
    """
    # Past the version, as an assignment is: what is kept for a backward pass does not see it.
    tensor.data.copy_(data.detach())


def can_be_put(tensor: torch.Tensor, data: Any) -> bool:
    """Whether an assignment to ``.data`` gives a tensor nothing but other numbers."""
    return isinstance(data, torch.Tensor) and (data.shape, data.dtype, data.device) == (
        tensor.shape,
        tensor.dtype,
        tensor.device,
    )
