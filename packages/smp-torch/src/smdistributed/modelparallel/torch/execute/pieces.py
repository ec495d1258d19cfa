"""What is captured in pieces, so that gradients are reduced while a graph computes others.

A backward pass of 100 ms that is one graph has its gradients reduced after it. As pieces, cut where
a bucket of gradients is full, the host starts the reduction of a bucket after each piece, and the
next piece computes meanwhile: what is exchanged is no part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from smdistributed.modelparallel.torch.execute.graphs import Capturing, Graph
from smdistributed.modelparallel.torch.execute.weight_gradients import note_added


class Piece(NamedTuple):
    """A graph after which the host does something.

    Attributes:
        graph: what is computed.
        added: the parameters to whose gradients it adds, in order.
    """

    graph: Graph
    added: Sequence[torch.Tensor]


class Foreseen(Protocol):
    """Knows when gradients leave."""

    def added(self, parameter: torch.Tensor) -> bool:
        """Takes note of what was added to a gradient; returns whether some leave now."""


class Pieces:
    """Cuts captures where gradients leave.

    Args:
        foreseen: know when they do.
    """

    def __init__(self, foreseen: Sequence[Foreseen]) -> None:
        self._foreseen = foreseen
        self._ended: list[list[torch.Tensor]] = []
        self._added: list[torch.Tensor] = []
        self._capturing: Capturing | None = None
        self._generators: Callable[[], Sequence[torch.Generator]] = tuple

    def begin(
        self, capturing: Capturing, generators: Callable[[], Sequence[torch.Generator]]
    ) -> None:
        """Begins a capture.

        Args:
            capturing: the capture.
            generators: gives those that may still be drawn from.
        """
        self._ended, self._added = [], []
        self._capturing, self._generators = capturing, generators

    def hook(self) -> Callable[[torch.Tensor], None]:
        """Returns a hook of parameters that hears to which gradients something was added."""

        def note(parameter: torch.Tensor) -> None:
            self._added.append(parameter)
            # Each is told, also if another one has said so.
            leaves = [each.added(parameter) for each in self._foreseen]
            assert self._capturing is not None
            if any(leaves) and self._capturing.cut(self._generators()):
                self._ended.append(self._added)
                self._added = []

        note.only_counts = True  # type: ignore[attr-defined] # see weight_gradients.py
        return note

    def end(self) -> list[Piece]:
        """Returns what was captured, when the capture has ended."""
        assert self._capturing is not None
        graphs, self._capturing = self._capturing.pieces, None
        return list(map(Piece, graphs, [*self._ended, self._added]))


def launch(pieces: Sequence[Piece]) -> None:
    """Does again what was captured; those who count gradients hear of them after each piece."""
    for piece in pieces:
        piece.graph.replay()
        tell(piece)


def tell(piece: Piece) -> None:
    """Tells those who count gradients what a piece, which was launched, adds to."""
    for parameter in piece.added:
        note_added(parameter)


def added_by(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Returns the parameters to whose gradients pieces add, in order."""
    return [parameter for piece in pieces for parameter in piece.added]
