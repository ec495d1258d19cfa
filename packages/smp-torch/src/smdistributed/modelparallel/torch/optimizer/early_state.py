"""What optimizers keep of slices from before their first update, as ``Adagrad`` does."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.parts.at_rest import InParts


@torch.no_grad()
def cut_early_state(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer that updates slices keep slices, where it has made whole tensors.

    Args:
        optimizer: of the script; slices stand for whole parameters now.
    """
    for parameter, kept in optimizer.state.items():
        if not isinstance(parameter, InParts):
            continue
        blocks = parameter.lying.blocks
        for key, value in kept.items():
            is_whole = isinstance(value, torch.Tensor) and value.shape == blocks.shape
            if is_whole and value.shape != blocks.values.shape:
                kept[key] = blocks.of_this_rank(value).clone()
