"""CUDA graphs: kernels that were launched once, launched again without what launched them."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.torch.compat.private.memory import (
    end_allocating,
    reuse_while_capturing,
)

#: Of the memory that there is; the rest is lost between tensors.
_USABLE = 0.9


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Does it again, in the stream that is current."""


class Capturing(Protocol):
    """A capture in progress.

    Attributes:
        pieces: what was captured, to be done again one after the other.
    """

    pieces: list[Graph]

    def cut(self, generators: Sequence[torch.Generator]) -> bool:
        """Begins another piece, so that the host can do something after what was captured so far.

        Args:
            generators: of those that the capture began with, what may still be drawn from.

        Returns:
            whether it did; not where several streams are captured, which end together.
        """


class Graphs(Protocol):
    """Captures what is done on a device. What is captured is not done."""

    @property
    def has_room(self) -> bool:
        """Whether there is memory for graphs, and beside it for all that was done until now."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Inside, several things are captured that are done again in the same order."""

    def capturing(
        self, generators: Sequence[torch.Generator]
    ) -> contextlib.AbstractContextManager[Capturing]:
        """Captures what is done inside, with what is drawn from generators of one's own."""

    def release(self) -> None:
        """Gives back all that was captured; it is not done again."""


class DeviceGraphs:
    """See ``Graphs``: of a GPU. All of them share memory: only one session is done at a time.

    Args:
        device: a GPU.
        uses_streams: what is captured runs on several streams.

    Attributes:
        uses_streams: the same.
    """

    def __init__(self, device: torch.device, *, uses_streams: bool) -> None:
        self.uses_streams = uses_streams
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        #: Those that there are.
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @property
    def has_room(self) -> bool:
        """See ``Graphs``: what graphs keep is at most what was needed besides what is there now."""
        device = self._stream.device
        free, _ = torch.cuda.mem_get_info(device)
        most = torch.cuda.max_memory_allocated(device)
        kept = most - torch.cuda.memory_allocated(device)
        return most + kept <= _USABLE * (free + torch.cuda.memory_reserved(device))

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See ``Graphs``."""
        if self.uses_streams:
            reuse_while_capturing()
        torch.cuda.synchronize()
        # What is collected while a graph is captured may be a graph, whose end is no part of it.
        gc.collect()
        torch.cuda.empty_cache()
        if not self._graphs:
            # Memory without a graph, of which tensors are left, takes no other graphs.
            self._pool = torch.cuda.graph_pool_handle()
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream), warnings.catch_warnings():
                # A pass may have nothing to compute.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                yield
        finally:
            if is_collecting:
                gc.enable()
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def capturing(self, generators: Sequence[torch.Generator]) -> Iterator[DeviceCapturing]:
        """See ``Graphs``."""
        capturing = DeviceCapturing(self)
        # What would wait for the device is an error before it does: afterwards the capture would
        # be no good any more, and memory that a thread of autograd frees then ends the process.
        former = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            # A piece ends in the thread in which it began.
            with torch.autograd.set_multithreading_enabled(False):
                capturing.begin(generators)
                yield capturing
        except BaseException:
            torch.cuda.set_sync_debug_mode(former)  # the end of a capture waits for the device
            with contextlib.suppress(RuntimeError):
                capturing.end()
            raise
        torch.cuda.set_sync_debug_mode(former)
        capturing.end()

    def begin(self, generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
        """Begins to capture."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        self._graphs.add(graph)
        # Other threads, as that of NCCL, may ask the device whatever they like meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        """Ends what ``begin`` began."""
        try:
            graph.capture_end()
        except RuntimeError:
            # What the capture has begun goes on: the stream captures, the allocator gives of its
            # memory, and generators count what a graph draws. Of the latter they are out after a
            # capture that ends well.
            if self.uses_streams:
                reuse_while_capturing(is_on=False)
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            self._end_allocating()
            if generators:
                self._capture_nothing(generators)
            raise

    def _capture_nothing(self, generators: Sequence[torch.Generator]) -> None:
        empty = torch.cuda.CUDAGraph()
        for generator in generators:
            empty.register_generator_state(generator)
        try:
            empty.capture_begin(self._pool, capture_error_mode="thread_local")
            empty.capture_end()
        except RuntimeError:
            self._end_allocating()

    def _end_allocating(self) -> None:
        with contextlib.suppress(RuntimeError):
            end_allocating(self._stream.device, self._pool)

    def release(self) -> None:
        """See ``Graphs``."""
        for graph in self._graphs:
            graph.reset()


class DeviceCapturing:
    """See ``Capturing``.

    Args:
        graphs: capture the pieces.
    """

    def __init__(self, graphs: DeviceGraphs) -> None:
        self._graphs = graphs
        self._generators: Sequence[torch.Generator] = ()
        self._piece: torch.cuda.CUDAGraph | None = None
        self.pieces: list[Graph] = []

    def begin(self, generators: Sequence[torch.Generator]) -> None:
        """Begins the first piece."""
        self._generators = generators
        self._piece = self._graphs.begin(generators)

    def cut(self, generators: Sequence[torch.Generator]) -> bool:
        """See ``Capturing``."""
        if self._graphs.uses_streams:
            return False
        former = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")  # see ``DeviceGraphs.capturing``
        self.end()
        torch.cuda.set_sync_debug_mode(former)
        self.begin(generators)
        return True

    def end(self) -> None:
        """Ends the last piece."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._graphs.end(piece, self._generators)
            self.pieces.append(piece)


def graphs_of(device: torch.device, *, uses_streams: bool) -> Graphs | None:
    """Returns what captures on a device; None where nothing can. See ``DeviceGraphs``."""
    return DeviceGraphs(device, uses_streams=uses_streams) if device.type == "cuda" else None
