"""Parts of a plan that are computed one after the other, without a backward pass.

What comes before a question about an activation is such a plan. It grows with the questions of a
microbatch, and what the questions before needed is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smdistributed.modelparallel.torch.planning.ranks import rank_of_glue
from smdistributed.modelparallel.torch.planning.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.replicated import sources


def on_one_rank(graph: Graph) -> Plan:
    """Returns the plan of a graph that the first rank computes alone, before models are placed."""
    for node in graph.nodes:
        node.rank = 0
        is_read_anew = node.kind in (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.ATTRIBUTE)
        node.segment = -1 if is_read_anew else 0
    return Plan(graph, [SegmentNodes(0, 0, list(graph.nodes))], {}, set(), set(), False)


def parts_between(plan: Plan, start: int, end: int, *, singly: bool) -> list[SegmentNodes]:
    """Returns what computes some nodes of a plan; all that they give goes out.

    Args:
        plan: the plan.
        start: the index of the first node.
        end: that of the first one behind them.
        singly: each node is a part.
    """
    parts = []
    for segment in plan.segments:
        own = [
            node
            for node in segment.nodes
            if node.segment == segment.index and start <= node.index < end
        ]
        for nodes in [[node] for node in own] if singly else [own]:
            if nodes:
                read = [value for node in nodes for value in (*node.inputs, *node.changed_views)]
                given = [value for node in nodes for value in node.outputs]
                parts.append(_part(segment.index, segment.rank, nodes, read, given))
    return parts


def part_giving(plan: Plan, values: Sequence[Value], start: int) -> SegmentNodes:
    """Returns what gives values, on the rank where code between modules would read them.

    Args:
        plan: what comes before was computed.
        values: of its graph.
        start: the index of the first node that was not: parameters that are read for the first
            time, say.
    """
    reader = Node(len(plan.graph.nodes), NodeKind.CALL, None, "a question", args=tuple(values))
    rank = rank_of_glue(reader, 0)
    own = [each for each in plan.graph.nodes[start:] if each.rank == rank and each.segment >= 0]
    return _part(len(plan.segments), rank, own, values, values)


def _part(
    index: int, rank: int, own: Sequence[Node], read: Iterable[Value], given: Sequence[Value]
) -> SegmentNodes:
    nodes = set(own)
    inputs: dict[Value, None] = {}
    for value in read:
        if value.node.segment < 0:
            nodes.update(sources([value]))
        elif value.node not in nodes:
            inputs[value] = None
    ordered = sorted(nodes, key=lambda node: node.index)
    # What another rank has made is its own; what this one has made, other values may show.
    foreign = {value for value in inputs if value.node.rank != rank}
    changed = foreign.intersection(value for node in ordered for value in node.changes)
    return SegmentNodes(index, rank, ordered, list(inputs), list(given), changed)
