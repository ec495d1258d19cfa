"""The kernels that torch's optimizers call, and their hooks, beyond PyTorch's public API."""

from __future__ import annotations

from typing import Any

import torch

#: Torch's fused kernels.
FUSED_ADAM: Any = torch._fused_adam_
FUSED_ADAMW: Any = torch._fused_adamw_
_OWN = "smdistributed.modelparallel."


def has_step_hooks(optimizer: Any) -> bool:
    """Tells whether a script, and not this library, sees what an optimizer has before a step.

    Args:
        optimizer: of torch.
    """
    from torch.optim import optimizer as module

    hooks = (optimizer._optimizer_step_pre_hooks, module._global_optimizer_pre_hooks)
    return any(
        not str(getattr(hook, "__module__", "")).startswith(_OWN)
        for registered in hooks
        for hook in registered.values()
    )
