"""What a distributed module knows of the job that it runs in."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.collectives.interface import Collectives, Sizes
from smdistributed.modelparallel.torch.collectives.shapes import is_fake


class Lanes(Protocol):
    """The random numbers of the step in progress, for the examples of each rank of the group."""

    @property
    def is_active(self) -> bool:
        """Whether a step is in progress."""

    def as_lane(self, lane: int) -> contextlib.AbstractContextManager[object]:
        """Inside, the draw in progress is the one that another rank makes for its examples."""


#: Gives a group. What a step is recorded from may hold functions, but no objects with state.
Handle = Callable[[], "TensorGroup"]


class TensorGroup:
    """The ranks that split a module between them.

    Each of them brings its own examples, and leaves with the results of these. With a prescaled
    batch all bring the same ones.

    Args:
        collectives: between the ranks; None where there is one.
        random: the random numbers of the step; None without a job.
        is_prescaled: the ranks bring the same examples.
        keeps_gathered: keep what was gathered for the backward pass, else gather it again.
    """

    def __init__(
        self,
        collectives: Collectives | None = None,
        random: Lanes | None = None,
        *,
        is_prescaled: bool = False,
        keeps_gathered: bool = True,
    ) -> None:
        self._collectives = collectives
        self.random = random
        self.size = 1 if collectives is None else collectives.size
        self.rank = 0 if collectives is None else collectives.rank
        self.is_prescaled = is_prescaled
        self.keeps_gathered = keeps_gathered
        self._known: list[tuple[int, ...]] = []

        def handle() -> TensorGroup:
            return self

        self.handle: Handle = handle

    @property
    def share_of_gradient(self) -> float:
        """What a rank's examples count for in the gradient of a slice that sees all of them."""
        return 1.0 if self.is_prescaled else 1.0 / self.size

    def agreed(self, number: int) -> int:
        """Returns the number that the first rank of the group gives. Collective: TP_GROUP."""
        return number if self.size == 1 else self.collectives.compare([number])[0][0]

    @property
    def collectives(self) -> Collectives:
        """Between the ranks; there are several."""
        assert self._collectives is not None
        return self._collectives

    @contextlib.contextmanager
    def examples(self, who: str, tensor: torch.Tensor, *more: object) -> Iterator[Sizes]:
        """Gives the number of examples of each rank, which a call of a module begins with.

        The modules inside a distributed module take what it has found. Collective: TP_GROUP.

        Args:
            who: calls, for messages.
            tensor: has the own examples along dim 0.
            more: what the ranks must agree on besides its other sizes.

        Raises:
            SMPError: the ranks call different modules, or with tensors that do not fit together.
        """
        own = tensor.shape[0]
        known = bool(self._known) and self._known[-1][self.rank] == own
        sizes = self._known[-1] if known else self._find(who, tensor, more)
        self._known.append(sizes)
        try:
            yield sizes
        finally:
            self._known.pop()

    def _find(self, who: str, tensor: torch.Tensor, more: tuple[object, ...]) -> tuple[int, ...]:
        own = tensor.shape[0]
        if self.size == 1 or is_fake(tensor):
            return (own,) * self.size
        kind = (
            f"{who} on examples of shape {tuple(tensor.shape[1:])}, {tensor.dtype}"
            f"{''.join(f', {each}' for each in more)}"
        )
        numbers = [own, zlib.crc32(kind.encode())]
        everyones = self.collectives.compare(numbers)
        sizes = tuple(each[0] for each in everyones)
        if any(each[1] != numbers[1] for each in everyones):
            self._refuse("must call the same distributed modules in the same way", kind)
        if self.is_prescaled and len(set(sizes)) > 1:
            self._refuse(
                "must bring the same examples, as prescaled_batch is on", f"{own} examples: {kind}"
            )
        return sizes

    def _refuse(self, rule: str, mine: str) -> None:
        everyones = self.collectives.compare_texts(mine)
        listed = "; ".join(f"tp_rank {rank}: {text}" for rank, text in enumerate(everyones))
        raise SMPError(f"the ranks of a tensor-parallel group {rule}; received {listed}.")
