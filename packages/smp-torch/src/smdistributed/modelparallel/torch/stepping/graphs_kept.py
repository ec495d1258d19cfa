"""Backward passes that keep their graphs, as one that follows in the microbatch goes there again.

``model.backward`` for each of two losses over one body is right in a pipeline, whose passes begin
when the step function has returned. With one partition a pass runs at once, and would let go of
what the next one needs. The first microbatch keeps all graphs and finds out which are shared. That
takes no more memory than others need: with several microbatches they have all activations and all
gradients too, and later steps have the optimizer's state. Its results are detached at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge

#: Of what PyTorch has compiled: it refuses to keep what it has planned to write over.
_COMPILED = "CompiledFunctionBackward"


class GraphsKept:
    """Which backward passes of a microbatch keep their graphs.

    Args:
        finds_out: the first microbatch does; else none keeps its graph.
    """

    def __init__(self, *, finds_out: bool) -> None:
        #: By the number of the pass in its microbatch; None until one has run to its end.
        self._kept: frozenset[int] | None = None if finds_out else frozenset()
        self._number = 0
        self._shared: set[int] = set()
        #: What each pass of the microbatch in progress went through.
        self._passes: list[set[Node]] = []

    def end_microbatch(self) -> None:
        """Takes note that a microbatch has run to its end."""
        if self._passes:
            self._kept = frozenset(self._shared)
        self.forget()

    def forget(self) -> None:
        """Lets go of the graphs of a microbatch."""
        self._number, self._shared, self._passes = 0, set(), []

    def keeps_next(self, tensors: torch.Tensor | Sequence[torch.Tensor]) -> bool:
        """Returns whether the next pass of the microbatch keeps its graph.

        Args:
            tensors: that are differentiated.
        """
        self._number += 1
        if self._kept is not None:
            return self._number - 1 in self._kept
        nodes = _nodes_of([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        self._shared.update(
            earlier for earlier, each in enumerate(self._passes) if not nodes.isdisjoint(each)
        )
        self._passes.append(nodes)
        return all(node.name() != _COMPILED for node in nodes)

    @property
    def are_shared(self) -> bool:
        """Whether some are known to be."""
        return bool(self._kept)

    @property
    def are_kept(self) -> bool:
        """Whether a pass of the microbatch in progress may have kept its graph."""
        return bool(self._kept or self._passes)


def _nodes_of(roots: Sequence[torch.Tensor]) -> set[Node]:
    """Returns what a pass goes through, without what adds up gradients of leaves."""
    found: set[Node] = set()
    ahead = [get_gradient_edge(each).node for each in roots if each.requires_grad]
    while ahead:
        node = ahead.pop()
        if node not in found and node.next_functions:
            found.add(node)
            ahead.extend(each for each, _ in node.next_functions if each is not None)
    return found
