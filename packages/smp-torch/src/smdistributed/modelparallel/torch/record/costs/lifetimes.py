"""How much memory would cross, if a run on fakes were cut before the call of a module.

A residual stream and what a branch beside it has computed are both needed after a cut inside the
branch; between two blocks there is the stream alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.torch.compat.private.tensors import has_memory, storage_of


@dataclass
class _Life:
    """Memory that an operation made.

    Attributes:
        born: how many modules had been called before it was made.
        used: the same of its last use.
        num_bytes: its size.
    """

    born: int
    used: int
    num_bytes: int


class Lifetimes:
    """When memory is made and used last, in numbers of modules that have been called.

    Attributes:
        called: how many have.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts a microbatch."""
        self.called = 0
        self._lives: dict[int, _Life] = {}
        self._over: list[_Life] = []

    def note(self, given: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Takes note of an operation.

        Args:
            given: what it reads or writes.
            made: what it returns.
        """
        known = set(map(storage_of, filter(has_memory, given)))
        for memory in known:
            if (life := self._lives.get(memory)) is not None:
                life.used = self.called
        for tensor in filter(has_memory, made):
            memory = storage_of(tensor)
            if memory not in known:  # a number is given again when its memory is gone
                if (former := self._lives.get(memory)) is not None:
                    self._over.append(former)
                size = tensor.numel() * tensor.element_size()
                self._lives[memory] = _Life(self.called, self.called, size)

    def crossing(self, num_modules: int) -> list[int]:
        """Returns for each call of a module the bytes made before it and used after it has begun.

        And for the end, where nothing is.

        Args:
            num_modules: how many have been called.
        """
        changes = [0] * (num_modules + 1)
        for life in itertools.chain(self._over, self._lives.values()):
            # What runs within another run may have counted further.
            born, used = min(life.born, num_modules), min(life.used, num_modules)
            changes[born] += life.num_bytes
            changes[used] -= life.num_bytes
        # What is born after the call of module k - 1 crosses the cut before module k.
        return list(itertools.accumulate(changes))
