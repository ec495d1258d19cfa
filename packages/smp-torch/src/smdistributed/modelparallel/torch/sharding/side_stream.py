"""What exchanges do beside what a GPU computes.

Memory is taken from and given back to the stream that computes: what goes beside it begins when
that stream has come to where it was asked for, and what it uses is kept until that stream has
waited for it. On a CPU everything is done in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Beside:
    """Something that was started beside what is computed.

    Args:
        stream: that it runs on; None where it has been done.
        used: memory of the computing stream that it uses.
    """

    def __init__(self, stream: torch.cuda.Stream | None, used: Sequence[torch.Tensor]) -> None:
        self._stream = stream
        self._done = None if stream is None else stream.record_event()
        self._used = used

    def wait(self) -> None:
        """Has what is computed from now on come after it."""
        if self._done is not None:
            torch.cuda.current_stream(self._done.device).wait_event(self._done)
        self._used = ()

    def abandon(self) -> None:
        """Does not wait: what it uses is not used for anything else before it is done."""
        if self._stream is not None:
            for each in self._used:
                each.record_stream(self._stream)
        self._used = ()


class SideStream:
    """A stream of a GPU for one kind of exchange; nothing on a CPU."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def run(
        self, device: torch.device, function: Callable[[], object], used: Sequence[torch.Tensor]
    ) -> Beside:
        """Does something after all that the computing stream has been given so far.

        Args:
            device: of the tensors.
            function: starts it; memory that it takes is its own.
            used: what it reads and writes besides.
        """
        if device.type != "cuda":
            function()
            return Beside(None, ())
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            function()
        return Beside(self._stream, used)
