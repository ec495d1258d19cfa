"""A tensor that a script gives a parameter in parts as its data or gradient.

In PyTorch both are one tensor from then on. So are they here: the tensor becomes what the script
sees of the parameter or gradient, and each rank keeps its own block. What else would see its memory
could not follow, so it must be alone.
"""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.owned import wake
from smdistributed.modelparallel.torch.compat.private.tensors import users_of_memory
from smdistributed.modelparallel.torch.parts.at_rest import InParts, Lying, hide
from smdistributed.modelparallel.torch.parts.blocks import Blocks


@torch.no_grad()
def blocks_of_given(tensor: Any, like: Blocks, told_dtype: torch.dtype) -> Blocks:
    """Returns the blocks of a tensor that takes the place of another one.

    Args:
        tensor: what the script gives.
        like: of what it takes the place of.
        told_dtype: the type that a script may give.

    Raises:
        UnsupportedError: it has another form, or others see its memory.
    """
    allowed = {told_dtype, like.values.dtype}
    wake(tensor)
    if isinstance(tensor, InParts):
        lying: Lying = tensor.lying
        blocks = lying.blocks
        is_former = (blocks.home, blocks.name, blocks.is_gradient) == (
            like.home,
            like.name,
            like.is_gradient,
        )
        if lying.is_all and is_former:
            return blocks
        is_alone = False
    else:
        is_alone = (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not tensor.requires_grad
            and tensor.device == like.values.device
            and users_of_memory(tensor) == 1
        )
    if tensor.shape != like.shape or tensor.dtype not in allowed or not is_alone:
        raise UnsupportedError(
            f"{like.told_of_ranks}, is given another tensor: what takes its place has "
            f"its form, and nothing else sees its memory. Received {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} for {told_dtype} of {tuple(like.shape)}"
            + ("" if is_alone else ", which another tensor sees, or which requires a gradient")
            + ": give it what detach().clone() returns, or write to it by copy_."
        )
    values = like.of_this_rank(tensor).to(like.values.dtype, copy=True).contiguous()
    blocks = like.like_these(values, is_gradient=like.is_gradient)
    hide(tensor, blocks.home.view_class, Lying.all_of(blocks))
    return blocks
