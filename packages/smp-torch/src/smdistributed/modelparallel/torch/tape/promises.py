"""Promises: tensors that look like others, without memory, until they are kept."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.below import without_memory
from smdistributed.modelparallel.torch.compat.private.tensors import become
from smdistributed.modelparallel.torch.tape.tape import Looks


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


def promise(looks: Looks) -> torch.Tensor:
    """Returns a tensor without memory."""
    made = torch.empty(0, dtype=looks.dtype, device=looks.device)
    made.data = without_memory(tuple(looks.shape), looks.dtype, looks.device, _Unkept)
    return made.requires_grad_() if looks.requires_grad else made


def keep(promised: torch.Tensor, tensor: torch.Tensor) -> None:
    """Has a promise become a tensor, wherever somebody holds it; nobody has used the tensor yet."""
    become(promised, tensor)
