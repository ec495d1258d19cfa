"""One update of an optimizer, left out where gradients were not finite.

Optimizers of torch that are made with ``fused=True`` ask the device themselves, in the kernel that
does everything else; all others are left out by the host, which waits for the answer.
"""

from __future__ import annotations

from typing import Any

import torch


def update(optimizer: torch.optim.Optimizer, found: torch.Tensor | None) -> bool:
    """Calls an optimizer's ``step``, unless something not finite was found.

    Args:
        optimizer: over tensors whose gradients are ready.
        found: 1 where a gradient is not finite; None if nobody looked. Shape: scalar.

    Returns:
        Whether the update may have been made; False: the host knows that it was not.
    """
    if found is None:
        optimizer.step()
        return True
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        _with_answer(optimizer, found)
        return True
    if found.item():
        return False
    optimizer.step()
    return True


def _with_answer(optimizer: Any, found: torch.Tensor) -> None:
    """Lets a fused optimizer read the answer on the device, as torch's GradScaler does."""
    optimizer.grad_scale, optimizer.found_inf = None, found
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
