"""Copies of what a save writes while training goes on.

Memory of the host that a device can copy to at full speed has to be pinned, which takes seconds for
some gigabytes. So a copy stays on the device where that has room, which takes milliseconds, and
goes to the host while training goes on: in pieces, through a little pinned memory, since a device
starts no kernels while it copies to other memory. Else it copies all to pinned memory, which torch
keeps for the next save.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from smdistributed.modelparallel.torch.tensors.nested import tensors_in

#: Of a device's memory, what is left free beside copies: a step may need more than any before it.
_SPARE = 0.05
#: Bytes of a piece.
_PIECE = 1 << 26


class HeldCopy:
    """A copy of a state that nothing changes any more.

    Tensors that share memory share it in the copy, so that a file has them once.

    Args:
        structure: the state.

    Attributes:
        state: the copy; its tensors may be on a device.
    """

    def __init__(self, structure: Any) -> None:
        tensors = list(tensors_in(structure))
        distinct = {_memory_of(each): each.detach() for each in tensors}
        self._events: dict[torch.device, torch.cuda.Event] = {}
        roomy = {device for device in _devices(tensors) if _has_room(device, distinct.values())}
        copies = {
            known: each.clone() if each.device in roomy else _begun(each)
            for known, each in distinct.items()
        }
        for device in _devices(tensors):
            stream = torch.cuda.current_stream(device)
            if device in roomy:
                self._events[device] = stream.record_event()
                self._piece = torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=True)
            else:
                stream.synchronize()
        memo: dict[int, Any] = {id(each): copies[_memory_of(each)] for each in tensors}
        self.state: Any = copy.deepcopy(structure, memo)

    def to_host(self) -> Any:
        """Returns it with its tensors on the host, and holds nothing any more. Any thread."""
        state, self.state = self.state, None
        streams: dict[torch.device, Any] = {}
        for device, event in self._events.items():
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device].wait_event(event)
        memo: dict[int, Any] = {}
        for tensor in tensors_in(state):
            stream = streams.get(tensor.device)
            memo[id(tensor)] = tensor if stream is None else self._brought(tensor, stream)
        return copy.deepcopy(state, memo)

    def _brought(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        """Returns a tensor on the host."""
        with torch.cuda.stream(stream):
            if not tensor.is_contiguous():
                return tensor.to("cpu")
            made = torch.empty_like(tensor, device="cpu")
            places = self._piece.view(tensor.dtype)
            pairs = zip(
                *(torch.split(each.view(-1), len(places)) for each in (tensor, made)), strict=True
            )
            for part, here in pairs:
                staged = places[: len(part)].copy_(part, non_blocking=True)
                stream.synchronize()
                here.copy_(staged)
        return made


def _devices(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    return {each.device for each in tensors if each.is_cuda}


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _has_room(device: torch.device, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a device has room for copies beside the most that it has held so far."""
    needed = sum(
        each.nbytes if each.layout is torch.strided else each.numel() * 16
        for each in tensors
        if each.device == device
    )
    free, capacity = torch.cuda.mem_get_info(device)
    usable = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return needed + _SPARE * capacity < usable


def _begun(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor on the host, which a device may still be making."""
    if not tensor.is_cuda or tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True)
    held = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return held.copy_(tensor, non_blocking=True)
