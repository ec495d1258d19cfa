"""Copies of activations in host memory: on their way out, there, and on their way back.

On a GPU each direction has a stream of its own, and nothing waits on the host. Device memory is
taken from and given back to the stream that computes: a copy back begins when that stream has come
to where it was asked for, and what goes out keeps its memory until that stream knows it to be gone.
So the peak does not depend on how far the host runs ahead. Pinned memory, and when it may be
written again, is torch's own allocator's.
"""

from __future__ import annotations

import collections
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.torch.activations.kept import Kept

#: Tensors that may be on their way out before the device waits for the first of them.
_MOST_LEAVING = 2


class HostCopy:
    """One tensor in host memory.

    Args:
        tensor: the memory.
        written: on a GPU, the event after which it holds the values.

    Attributes:
        spoiled: the tensor was changed in place before its values had been copied.
    """

    def __init__(self, tensor: torch.Tensor, written: Any = None) -> None:
        self.tensor = tensor
        self.written = written
        self.spoiled: RuntimeError | None = None


class Arrival(Protocol):
    """A tensor on its way back."""

    def get(self) -> torch.Tensor:
        """Returns it, for the stream that computes now."""


class Copies(Protocol):
    """Copies in both directions."""

    def store(self, tensor: torch.Tensor) -> HostCopy:
        """Starts a copy to the host, with the same strides."""

    def fetch(self, copy: HostCopy) -> Arrival:
        """Starts a copy from the host."""

    def settle(self) -> None:
        """Lets go of what is still on its way out."""


def copies_for(device: torch.device) -> Copies:
    """Returns what copies for a device."""
    return _StreamCopies(device) if device.type == "cuda" else _PlainCopies()


class _Here:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get(self) -> torch.Tensor:
        return self._tensor


class _PlainCopies:
    """On the CPU a copy is a copy, made at once."""

    def store(self, tensor: torch.Tensor) -> HostCopy:
        return HostCopy(torch.empty_like(tensor).copy_(tensor.detach()))

    def fetch(self, copy: HostCopy) -> Arrival:
        return _Here(torch.empty_like(copy.tensor).copy_(copy.tensor))

    def settle(self) -> None:
        pass


class _Coming:
    def __init__(self, tensor: torch.Tensor, written: torch.cuda.Event) -> None:
        self._tensor = tensor
        self._written: torch.cuda.Event | None = written

    def get(self) -> torch.Tensor:
        self._wait()
        return self._tensor

    def _wait(self) -> None:
        if self._written is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._written)
            self._written = None

    def __del__(self) -> None:
        # Its memory goes back to the stream that computes, which must not write there before.
        self._wait()


class _StreamCopies:
    """On a GPU, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: collections.deque[tuple[Kept, HostCopy]] = collections.deque()

    def store(self, tensor: torch.Tensor) -> HostCopy:
        while len(self._leaving) >= _MOST_LEAVING:
            self._let_go()
        kept = Kept.of(tensor)
        copy = HostCopy(torch.empty_like(kept.tensor, device="cpu", pin_memory=True))
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            copy.tensor.copy_(kept.tensor, non_blocking=True)
            copy.written = self._out.record_event()
        self._leaving.append((kept, copy))
        return copy

    def fetch(self, copy: HostCopy) -> Arrival:
        # Whether it was changed in place before its values were copied must be known now.
        while any(each is copy for _, each in self._leaving):
            self._let_go()
        tensor = torch.empty_like(copy.tensor, device=self._device, pin_memory=False)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(copy.written)
        with torch.cuda.stream(self._back):
            tensor.copy_(copy.tensor, non_blocking=True)
            return _Coming(tensor, self._back.record_event())

    def settle(self) -> None:
        while self._leaving:
            self._let_go()

    def _let_go(self) -> None:
        kept, copy = self._leaving.popleft()
        torch.cuda.current_stream(self._device).wait_event(copy.written)
        try:
            kept.get()
        except RuntimeError as error:
            copy.spoiled = error
