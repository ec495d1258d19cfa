"""The exchanges of forward passes, by number, and which of them a backward pass will reach."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from smdistributed.modelparallel.torch.compat.private.backward import will_be_reached
from smdistributed.modelparallel.torch.compat.private.modes import past_all_modes

#: Exchanges, by number: the same on all ranks.
Numbers = frozenset[int]


@dataclass(frozen=True)
class Result:
    """What an exchange has given, in a graph of autograd.

    Attributes:
        edge: where its gradient enters the graph, while there is one.
        zeros: such a gradient.
    """

    edge: Callable[[], GradientEdge | None]
    zeros: Callable[[], torch.Tensor]

    @property
    def node(self) -> Node | None:
        """What has given it."""
        edge = self.edge()
        return None if edge is None else edge.node


class Noted:
    """The exchanges of what is differentiated together: a microbatch, or a segment's pass.

    Args:
        keeps_graphs: have them live as long as this does, not as long as the script has them.
        is_used_once: one backward pass goes through them.

    Attributes:
        results: those that have graphs, by number.
        agreed: the passes of autograd that ranks have agreed on.
        spent: whose part of a graph has been let go of by a pass.
    """

    def __init__(self, *, keeps_graphs: bool, is_used_once: bool = False) -> None:
        self._keeps_graphs = keeps_graphs
        self.is_used_once = is_used_once
        self._names: list[str] = []
        self.results: dict[int, Result] = {}
        self.agreed: set[int] = set()
        self.spent: set[int] = set()

    @property
    def count(self) -> int:
        """How many exchanges there were, the same on all ranks."""
        return len(self._names)

    def add(self, tensor: torch.Tensor, name: str) -> Node | None:
        """Adds what an exchange has given, of a module of a name; returns its node, if any."""
        self._names.append(name)
        node = tensor.grad_fn
        if node is not None:
            weak = weakref.ref(node)
            self.results[self.count] = Result(
                _kept_edge(tensor) if self._keeps_graphs else _passing_edge(weak, tensor.output_nr),
                functools.partial(
                    torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device
                ),
            )
        return node

    def drop_dead(self) -> None:
        """Lets go of what nobody can differentiate any more."""
        for number, result in list(self.results.items()):
            if result.node is None:
                del self.results[number]

    def reached(self, roots: Sequence[Node]) -> Numbers:
        """Returns the exchanges that the backward pass in progress will reach.

        Args:
            roots: where it begins, of which autograd does not tell.
        """
        begins = set(roots)
        found = ((number, result.node) for number, result in self.results.items())
        return frozenset(
            number
            for number, node in found
            if node is not None and (node in begins or will_be_reached(node))
        )

    @property
    def left(self) -> Numbers:
        """Those that a backward pass can still go through."""
        alive = {number for number, result in self.results.items() if result.node is not None}
        return frozenset(alive - self.spent)

    def names_of(self, numbers: Iterable[int]) -> str:
        """Returns of which modules exchanges are, for messages."""
        names = dict.fromkeys(self._names[each - 1] for each in sorted(numbers))
        return ", ".join(names) or "nothing"


def _kept_edge(result: torch.Tensor) -> Callable[[], GradientEdge]:
    """Returns where a gradient enters a graph, which it keeps."""
    with past_all_modes():
        edge = get_gradient_edge(result)  # the node alone keeps no graph that Python is part of
    return lambda: edge


def _passing_edge(node: weakref.ref[Node], place: int) -> Callable[[], GradientEdge | None]:
    """Returns where a gradient enters a graph for as long as there is one."""

    def edge() -> GradientEdge | None:
        found = node()
        return None if found is None else GradientEdge(found, place)

    return edge
