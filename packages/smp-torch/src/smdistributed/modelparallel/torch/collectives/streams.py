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
from smdistributed.modelparallel.torch.compat.between import effect


class Mark:
    """Tells when all is done that was started on the stream until some moment."""

    #: Each pass has its own, see ``tape``.
    lives_for_a_pass = True

    event: torch.cuda.Event | None = None


class ExchangeStream:
    """A stream of a GPU, or nothing on a CPU.

    Args:
        device: where exchanges run.

    Attributes:
        device: as given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._other: torch.cuda.Stream | None = None
        self._is_entered = False
        #: By calls of ``beside`` in progress, what was current before.
        self._before: list[torch.cuda.Stream] = []
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
        if self.is_current:
            yield
            return
        self._enter(*given)
        self._is_entered = True
        try:
            yield
        finally:
            self._is_entered = False
            self._leave()

    @effect
    def _enter(self, *given: torch.Tensor) -> None:
        assert self._stream is not None
        self._other = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(self._other)
        _used_on(self._stream, given)
        torch.cuda.set_stream(self._stream)

    @effect
    def _leave(self) -> None:
        assert self._other is not None
        torch.cuda.set_stream(self._other)

    def mark(self) -> Mark | None:
        """Returns what tells that all that was started on the stream until now is done."""
        if self._stream is None:
            return None
        mark = Mark()
        self._record(mark)
        return mark

    @effect
    def _record(self, mark: Mark) -> None:
        assert self._stream is not None
        mark.event = self._stream.record_event()

    def wait(self, mark: Mark | None, made: Sequence[torch.Tensor] = ()) -> None:
        """What is started from now on runs after a mark of the stream.

        Args:
            mark: the mark.
            made: what was made on the stream, and is used now.
        """
        if mark is not None and not self.is_current:
            self._await(mark, *made)

    @effect
    def _await(self, mark: Mark, *made: torch.Tensor) -> None:
        assert mark.event is not None
        other = torch.cuda.current_stream(self.device)
        other.wait_event(mark.event)
        _used_on(other, made)

    def used_before(self, made: Sequence[torch.Tensor]) -> None:
        """Says that what was made inside ``entered`` is used on the stream that was current before.

        That one has to wait for it all the same.
        """
        if self._stream is not None:
            assert self._other is not None
            _used_on(self._other, made)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, what computes is on another stream than this one; afterwards neither is ahead.

        A checkpointed call may be repeated by an exchange, in its backward pass; what it makes is
        then used on both.
        """
        if self._stream is None:
            yield
            return
        self._part()
        try:
            yield
        finally:
            self._meet()

    @effect
    def _part(self) -> None:
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        self._before.append(current)
        if current == self._stream:
            assert self._other is not None
            self._other.wait_stream(current)
            torch.cuda.set_stream(self._other)

    @effect
    def _meet(self) -> None:
        assert self._stream is not None
        other = torch.cuda.current_stream(self.device)
        other.wait_stream(self._stream)
        self._stream.wait_stream(other)
        torch.cuda.set_stream(self._before.pop())

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, it belongs to what is done on the current stream: all of it may be captured."""
        if self._stream is None:
            yield
            return
        other = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(other)
        yield
        other.wait_stream(self._stream)

    @property
    def is_current(self) -> bool:
        """Whether what is started now has its place in the order of exchanges."""
        if self._stream is None or self._is_entered:
            return True
        return torch.cuda.current_stream(self.device) == self._stream


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

    def sum_parts(self, parts: Sequence[torch.Tensor], *, with_own: bool = True) -> torch.Tensor:
        """See ``Collectives.sum_parts``."""
        with self._stream.entered(*parts):
            made = super().sum_parts(parts, with_own=with_own)
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
