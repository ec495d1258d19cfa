"""Promises: tensors that look like others, without memory, until they are kept."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.below import without_memory
from smdistributed.modelparallel.torch.compat.private.tensors import become
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec


class _Unkept:
    """What operations come to that no function of torch was called for."""

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuses an operation.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{func} was called past the functions of torch in a pass that runs as a CUDA graph, "
            "and was not when the pass was recorded. Call smp.step with cuda_graphs=False."
        )


def promise(spec: TensorSpec) -> torch.Tensor:
    """Returns a tensor without memory."""
    made = torch.empty(0, dtype=spec.dtype, device=spec.device)
    made.data = without_memory(spec.shape, spec.dtype, spec.device, _Unkept)
    return made.requires_grad_() if spec.requires_grad else made


def keep(promised: torch.Tensor, tensor: torch.Tensor) -> None:
    """Has a promise become a tensor, wherever somebody holds it; nobody has used the tensor yet."""
    become(promised, tensor)
