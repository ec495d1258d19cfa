"""The stream that exchanges run on, beside the one that computes.

All exchanges of a group run on one stream, so their order on the device is that of the calls. Code
that wants them beside its computation enters the stream itself, and waits for what it needs later;
autograd does the same in the backward pass. On a CPU there is one order of everything, and all of
this does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from smdistributed.modelparallel.torch.collectives.delegating import DelegatingCollectives
from smdistributed.modelparallel.torch.collectives.interface import Collectives, Sizes


class ExchangeStream:
    """A stream of a GPU, or nothing on a CPU.

    Args:
        device: where exchanges run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._other: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # What it runs is short, and others wait for it.
            self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                device, priority=-1
            )
            self._other = torch.cuda.current_stream(device)
            # Norms between exchanges have parameters, whose gradients are added up elsewhere.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    @contextlib.contextmanager
    def entered(self, *given: torch.Tensor) -> Iterator[None]:
        """Inside, work is started on the stream, after all that was started before.

        Args:
            given: what the work reads.
        """
        stream = self._stream
        if stream is None or self.is_current:
            yield
            return
        other = self._other = torch.cuda.current_stream(self._device)
        stream.wait_stream(other)
        _used_on(stream, given)
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Returns what tells that all that was started on the stream until now is done."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None, made: Sequence[torch.Tensor] = ()) -> None:
        """What is started from now on runs after a mark of the stream.

        Args:
            mark: the mark.
            made: what was made on the stream, and is used now.
        """
        if mark is None or self.is_current:
            return
        other = torch.cuda.current_stream(self._device)
        other.wait_event(mark)
        _used_on(other, made)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, what computes is on another stream than this one; afterwards neither is ahead.

        A checkpointed call may be repeated by an exchange, in its backward pass; what it makes is
        then used on both.
        """
        stream = self._stream
        if stream is None:
            yield
            return
        is_current = self.is_current
        other = self._other if is_current else torch.cuda.current_stream(self._device)
        assert other is not None
        if is_current:
            other.wait_stream(stream)
        try:
            with torch.cuda.stream(other):
                yield
        finally:
            other.wait_stream(stream)
            stream.wait_stream(other)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, it belongs to what is done on the current stream: all of it may be captured."""
        if self._stream is None:
            yield
            return
        other = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(other)
        yield
        other.wait_stream(self._stream)

    @property
    def is_current(self) -> bool:
        """Whether what is started now has its place in the order of exchanges."""
        return self._stream is None or torch.cuda.current_stream(self._device) == self._stream


class OnOneStream(DelegatingCollectives):
    """Starts each exchange of a backend on one stream, and has its caller wait for it.

    Args:
        backend: moves the tensors.
        stream: where.
    """

    def __init__(self, backend: Collectives, stream: ExchangeStream) -> None:
        super().__init__(backend)
        self._stream = stream

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.gather``."""
        with self._stream.entered(tensor):
            made = super().gather(tensor, sizes)
        return self._awaited(made)

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.scatter_sum``."""
        with self._stream.entered(tensor):
            made = super().scatter_sum(tensor, sizes)
        return self._awaited(made)

    def scatter_parts(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """See ``Collectives.scatter_parts``; what is read on another stream is summed first."""
        if self._stream.is_current:
            return super().scatter_parts(tensor, sizes)
        return [self.scatter_sum(tensor, sizes)]

    def meet(self) -> None:
        """See ``Collectives.meet``."""
        with self._stream.entered():
            super().meet()
        self._stream.wait(self._stream.mark())

    def swap(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> list[torch.Tensor]:
        """See ``Collectives.swap``."""
        with self._stream.entered(*parts):
            made = super().swap(parts, shapes)
        self._stream.wait(self._stream.mark(), made)
        return made

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.sum``."""
        with self._stream.entered(tensor):
            made = super().sum(tensor)
        return self._awaited(made)

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.from_first``."""
        with self._stream.entered(tensor):
            made = super().from_first(tensor)
        return self._awaited(made)

    def _awaited(self, made: torch.Tensor) -> torch.Tensor:
        self._stream.wait(self._stream.mark(), [made])
        return made


def _used_on(stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)
