"""Checkpointed calls in a recording: what keeps no activations, and computes them again.

What is computed again writes state again: running statistics, counters, caches. One process does so
once for each call, in the backward pass of the same microbatch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import torch

from smdistributed.modelparallel.torch.tensors.writes import writes_of


class Again(enum.Enum):
    """How a checkpointed call is computed again."""

    #: As far as what autograd has kept of it, whose graph stays.
    AS_NEEDED = "as needed"
    #: To the end.
    TO_THE_END = "to the end"
    #: To the end, with a graph of its own, where numbers of Python may be others.
    REENTRANT = "reentrant"


class Region(NamedTuple):
    """A checkpointed call of a microbatch; of those inside each other, the outermost one.

    Attributes:
        number: among those of the microbatch.
        how: it is computed again.
        depth: how many checkpointed calls lie around this place.
    """

    number: int
    how: Again
    depth: int = 1


class BuffersWatched:
    """Sees which buffers a region writes to.

    Args:
        buffers: all that there are.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._states = [(each, writes_of(each)) for each in buffers]

    def written(self) -> list[int]:
        """Returns the identities of those that were written to since."""
        return [id(each) for each, state in self._states if writes_of(each) != state]
