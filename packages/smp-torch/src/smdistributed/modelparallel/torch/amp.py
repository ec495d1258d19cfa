"""``smp.amp``: what stands for ``torch.cuda.amp`` in a script.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from smdistributed.modelparallel.torch.api.slot import slot

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Scales the loss so that small gradients do not vanish; use it like torch's.

    An infinite gradient on any rank makes every rank skip the update. Give it the
    ``DistributedOptimizer``. With the library initialised torch's own scaler does the same; this
    one takes the device on which the process computes.

    Collective: every rank calls ``unscale_`` and ``step``, also one without parameters.

    Args:
        device: as torch's modern form has it, first or by keyword; the process's own is taken.
        init_scale: as in ``torch.amp.GradScaler``, like the others.
        growth_factor: see there.
        backoff_factor: see there.
        growth_interval: see there.
        enabled: see there.

    Raises:
        NotInitializedError: before ``smp.init``.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], str | torch.device):
            args = args[1:]
        else:
            kwargs.pop("device", None)
        super().__init__(slot.get().device.type, *args, **kwargs)


def _documented(
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> None:
    """Has the documented signature."""


GradScaler.__signature__ = inspect.signature(_documented)  # type: ignore[attr-defined]
