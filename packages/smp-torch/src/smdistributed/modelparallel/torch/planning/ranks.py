"""Which rank runs a node, by the partition of modules and parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.changed_parameters import ChangedParameters
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind
from smdistributed.modelparallel.torch.record.trace.buffers import KeptBuffer


class Ranks:
    """Gives the nodes of a graph their ranks, one after the other.

    Args:
        graph: the captured microbatch.
        partition_of: the partition of every leaf module.
        owner_of: the partition that holds a parameter.

    Attributes:
        parameters: that the graph writes to.
    """

    def __init__(
        self,
        graph: Graph,
        partition_of: Mapping[nn.Module, int],
        owner_of: Callable[[Slot], int],
    ) -> None:
        self._partition_of = partition_of
        self._owner_of = owner_of
        self._graph = graph
        self._current = 0
        self.parameters = ChangedParameters(graph, owner_of)
        self._travelling = self._find_travelling(graph)
        #: Of the buffers that the graph changes, those whose last value is made on some rank.
        self._buffers: dict[Slot, int] = self._find_buffers(graph)

    def place(self, node: Node) -> bool:
        """Gives the next node its rank.

        Returns:
            whether it runs there alone. Others run wherever they are needed, and parameters are
            read where they lie.
        """
        slot = changed_buffer(self._graph, node)
        if slot is not None:
            node.rank = self._buffers.setdefault(slot, self._current)
        elif node.replicated or node.kind in (NodeKind.INPUT, NodeKind.CONSTANT):
            return False
        elif node.kind is NodeKind.ATTRIBUTE:
            node.rank = self._owner_of(node.target)
            if node not in self._travelling:
                return False
        elif node in self.parameters.views:
            node.rank = self.parameters.views[node]
            return False
        elif node in self.parameters.ranks:
            node.rank = self.parameters.ranks[node]
        elif node.beside is not None:
            node.rank = node.beside.rank
        elif node.kind is NodeKind.LEAF:
            node.rank = self._partition_of[node.target]
        else:
            node.rank = rank_of_glue(node, self._current, self.parameters.views)
        self._current = node.rank
        return True

    def _find_buffers(self, graph: Graph) -> dict[Slot, int]:
        """Returns the ranks that make the last value of buffers which the graph changes."""
        ranks: dict[Node, int] = {}
        found: dict[Slot, int] = {}
        for node in graph.nodes if graph.buffers else ():
            slot = changed_buffer(graph, node)
            makers = [each.node for each in node.inputs if each.node in ranks]
            if node.kind is NodeKind.LEAF:
                ranks[node] = self._partition_of[node.target]
            elif node.kind is NodeKind.ATTRIBUTE and slot is None and not node.replicated:
                ranks[node] = self._owner_of(node.target)
            elif makers:
                ranks[node] = ranks[max(makers, key=lambda maker: maker.index)]
            if isinstance(node.target, KeptBuffer) and slot is not None and node in ranks:
                found[slot] = ranks[node]
        told = {slot: each.rank for slot, each in graph.buffers.items() if each.rank is not None}
        return found | told

    def _find_travelling(self, graph: Graph) -> set[Node]:
        """Returns the parameters that leave their partition as they are.

        Glue hands them to a module of another partition, returns or differentiates them.
        """
        handed = [
            value
            for node in graph.nodes
            if node.kind is NodeKind.LEAF
            for value in node.inputs
            if value.node.kind is NodeKind.ATTRIBUTE
            and not value.replicated
            and self._owner_of(value.node.target) != self._partition_of[node.target]
        ]
        ends = [
            value
            for value in (*graph.roots, *graph.returned)
            if value.node.kind is NodeKind.ATTRIBUTE and not value.replicated
        ]
        return {*(value.node for value in (*handed, *ends)), *self.parameters.given}

    @property
    def in_order(self) -> list[Node]:
        """The nodes, parameters first that come over for writes to those of other partitions."""
        first = dict.fromkeys(self.parameters.given)
        return [*first, *(node for node in self._graph.nodes if node not in first)]


def changed_buffer(graph: Graph, node: Node) -> Slot | None:
    """Returns the buffer that a node reads or keeps, if the graph changes it; else None."""
    if isinstance(node.target, KeptBuffer):
        return node.target.module, node.target.name
    is_changed = node.kind is NodeKind.ATTRIBUTE and node.target in graph.buffers
    return node.target if is_changed else None


def rank_of_glue(node: Node, current: int, views: Container[Node] = ()) -> int:
    """Glue runs where its parameter is, else where its latest operand was made.

    Args:
        node: the call.
        current: where the calls before it are made.
        views: calls that show parameters, where these lie.
    """
    made_by = [value.node for value in node.inputs if not value.replicated]
    lying = [maker for maker in made_by if maker.kind is NodeKind.ATTRIBUTE or maker in views]
    owners = {maker.rank for maker in lying}
    if len(owners) > 1:
        raise UnsupportedError(
            f"{node.name} combines the parameters {', '.join(sorted(each.name for each in lying))},"
            f" which live on partitions {sorted(owners)}. Put the modules that hold them on one "
            "partition."
        )
    if owners:
        return owners.pop()
    return max(made_by, key=lambda maker: maker.index).rank if made_by else current
