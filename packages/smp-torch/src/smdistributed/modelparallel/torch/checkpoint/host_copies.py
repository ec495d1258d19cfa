"""Copies on the host of what a save writes while training goes on."""

from __future__ import annotations

import copy
from typing import Any

import torch

from smdistributed.modelparallel.torch.tensors.nested import tensors_in


def host_copy(structure: Any) -> Any:
    """Returns a copy of a state that nothing changes any more, with its tensors on the host.

    Tensors that share memory share it in the copy, so that a file has them once. What comes from a
    device lies in pinned memory: the device copies all of it without waiting in between, and torch
    keeps the memory for the next save.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for tensor in tensors_in(structure):
        known = _memory_of(tensor)
        if known not in copies:
            copies[known] = _begun(tensor.detach())
        memo[id(tensor)] = copies[known]
    for device in {each.device for each in tensors_in(structure) if each.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copy.deepcopy(structure, memo)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _begun(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor, which a device may still be making."""
    if not tensor.is_cuda or tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True)
    held = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return held.copy_(tensor, non_blocking=True)
