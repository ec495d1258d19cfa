"""The backward pass of a microbatch, as it runs on fakes: what memory there is at each operation.

Nobody keeps anything there but autograd, and memory goes when it goes in a job.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.common.planning.pass_tape import BackwardTape
from smdistributed.modelparallel.torch.compat.private.tensors import has_memory
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec


@dataclass(eq=False)
class KeptFor:
    """How long autograd keeps a tensor.

    Attributes:
        at: the operation for whose gradient it does.
        freed: in how many operations of the backward pass it is free again; None if it is not.
    """

    at: int
    freed: int | None = None


class BackwardWriter:
    """Takes note of the operations of backward passes, and of the memory that is there at each.

    Attributes:
        is_running: a backward pass runs.
        names: of the operations, where they are told.
        sums: of gradients that are added to those of parameters: the operation, and the spec of
            the gradient.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.names: list[str] = []
        self.sums: list[tuple[int, TensorSpec]] = []
        self._is_paused = False
        self._position = 0
        #: Of each operation, where in the forward pass it belongs.
        self._positions: list[int] = []
        self._used: list[tuple[int, KeptFor]] = []
        #: By the number of the memory: from which operation on it is there, and its size.
        self._alive: dict[int, tuple[int, int]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        #: How much there is more from an operation on.
        self._changes: dict[int, int] = {}

    @contextlib.contextmanager
    def running(self, position: int) -> Iterator[None]:
        """Inside, a backward pass runs.

        Args:
            position: in the forward pass, where it begins.
        """
        self._position, self.is_running = position, True
        try:
            yield
        finally:
            self.is_running = False
            self._settle(ends=True)

    def tape(self) -> BackwardTape:
        """Returns what was noted."""
        return BackwardTape(tuple(self._positions), dict(self._changes))

    def note(self, made: Iterable[torch.Tensor], name: str = "") -> None:
        """Takes note of an operation.

        Args:
            made: what it returns, as far as it has memory.
            name: of the operation.
        """
        tensors = list(made)
        if self._is_paused or not tensors:
            return
        now = len(self._positions)
        self._positions.append(self._position)
        self.names.append(name)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if self._watch(storage):
                self._alive[storage._cdata] = now, storage.nbytes()
                self._change(now, storage.nbytes())

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Takes note of a tensor that the forward pass has made."""
        if has_memory(tensor):
            self._watch(tensor.untyped_storage())

    def _watch(self, storage: torch.UntypedStorage) -> bool:
        """Watches memory; returns whether it is new."""
        number = storage._cdata
        if number in self._watched:
            return False
        self._watched[number] = weakref.ref(storage, self._freeing(number))
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what is made is there already."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _freeing(self, number: int) -> Callable[[object], None]:
        def free(_: object) -> None:
            self._watched.pop(number, None)
            if (found := self._alive.pop(number, None)) is not None:
                self._change(max(len(self._positions), found[0] + 1), -found[1])

        return free

    def _change(self, at: int, num_bytes: int) -> None:
        self._changes[at] = self._changes.get(at, 0) + num_bytes

    def note_used(self, kept: KeptFor) -> None:
        """Takes note that autograd takes what it keeps."""
        self._settle()
        # What came after the operation whose gradient this is, is over.
        self._position = min(kept.at, self._position)
        self._used.append((len(self._positions), kept))

    def _settle(self, *, ends: bool = False) -> None:
        """Has what was used be free, if operations have come since."""
        now = len(self._positions)
        for used, kept in self._used:
            if used < now or ends:
                kept.freed = now
        self._used = [] if ends else [each for each in self._used if each[0] == now]

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes note that gradients are added to those of parameters when they are there."""
        for each in gradients:
            number = each.untyped_storage()._cdata
            if (found := self._alive.pop(number, None)) is not None:
                self._change(found[0] + 1, -found[1])
                self.sums.append((found[0], TensorSpec.of(each)))
