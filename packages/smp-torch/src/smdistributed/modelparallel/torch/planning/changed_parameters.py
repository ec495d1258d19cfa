"""Parameters that code between modules writes to: averages of weights, first values by data.

A parameter, and a buffer of a module that stays whole, lies on one rank, which writes to it there,
in the order of the script. Microbatches run one after the other, so that each pass finds what it
would find in one process. What is computed of parameters alone for such a write is computed there,
too: parameters of other partitions come over once, when the microbatch begins.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import (
    Graph,
    Node,
    NodeKind,
    Value,
    changed_attributes,
)

_REMEDY = "Put the modules that it concerns on one partition, or do it between two calls of steps."


class ChangedParameters:
    """Where calls that belong to writes to parameters are made.

    Args:
        graph: the captured microbatch.
        owner_of: the partition that holds a parameter.

    Attributes:
        lying: the values that lie in the memory of what the graph writes to, and what that is.
        ranks: of writes, and of calls that compute of parameters alone for them.
        views: calls that show what is written to, with its rank; they are made wherever that is
            read.
        given: the parameters of other partitions that such calls read.

    Raises:
        UnsupportedError: one call writes to parameters of two partitions.
    """

    def __init__(self, graph: Graph, owner_of: Callable[[Slot], int]) -> None:
        self._owner_of = owner_of
        writes = {node: found for node in graph.nodes if (found := written_in_place(graph, node))}
        written = dict.fromkeys(slot for slots in writes.values() for slot in slots)
        self.lying: dict[Value, Slot] = {
            value: slot
            for node in graph.nodes
            for slot in written
            if node.target == slot or slot in node.shows
            for value in node.outputs
        }
        self.ranks = {node: self._only_rank(node, slots) for node, slots in writes.items()}
        self.views = {
            value.node: owner_of(slot)
            for value, slot in self.lying.items()
            if value.node.kind is NodeKind.CALL and value.node not in writes
        }
        if writes:
            self._place_arithmetic(graph, list(writes))
        self.given = [
            node
            for node in graph.nodes
            if node.kind is NodeKind.ATTRIBUTE
            and node.outputs[0] not in self.lying
            and any(self._reads(reader, node) for reader in self.ranks)
        ]

    def _reads(self, reader: Node, attribute: Node) -> bool:
        is_elsewhere = self.ranks[reader] != self._owner_of(attribute.target)
        return is_elsewhere and not attribute.replicated and attribute.outputs[0] in reader.inputs

    def _only_rank(self, node: Node, slots: Iterable[Slot]) -> int:
        ranks = {self._owner_of(slot) for slot in slots}
        if len(ranks) > 1:
            raise UnsupportedError(
                f"{node.name} writes to parameters of partitions {sorted(ranks)} in one call, "
                f"while a pipelined step runs. Write to them one after the other. {_REMEDY}"
            )
        return ranks.pop()

    def _place_arithmetic(self, graph: Graph, writes: Iterable[Node]) -> None:
        """Has what is computed of parameters alone computed where it is written."""
        alone: set[Node] = set()
        for node in graph.nodes:
            is_call = node.kind is NodeKind.CALL and not node.replicated
            if node.kind is NodeKind.ATTRIBUTE or (
                is_call
                and node.beside is None
                and not any(value.requires_grad for value in node.outputs)
                and all(value.replicated or value.node in alone for value in node.inputs)
            ):
                alone.add(node)
        for write in writes:
            pending = list(write.inputs)
            while pending:
                value = pending.pop()
                node = value.node
                if node.kind is NodeKind.CALL and node in alone and node not in self.ranks:
                    if node not in self.views:
                        self.ranks[node] = self.ranks[write]
                    pending += node.inputs
                    sources = (each.source for each in node.outputs)
                    pending += [each for each in sources if isinstance(each, Value)]

    def check(self, graph: Graph) -> None:
        """Makes sure that what the graph writes to is seen by all that one process would show it.

        Args:
            graph: the same; its nodes have their ranks.

        Raises:
            UnsupportedError: it is not.
        """
        if not self.lying:
            return
        taken = dict.fromkeys((*graph.returned, *graph.roots))
        _check_parted(graph, taken)
        for position, node in enumerate(graph.nodes):
            self._check_reads(node)
            for slot in written_in_place(graph, node):
                _check_write(node, slot, graph.nodes[:position])
        for node in _in_several_segments(graph):
            for slot in dict.fromkeys(self.lying.values()):
                if _uses(node, slot):
                    raise _refused(
                        node.name,
                        slot,
                        "is computed again, for a checkpointed call that is split, with",
                    )
        for value in taken:
            if value in self.lying:
                raise _refused("the step function", self.lying[value], "returns or stores")

    def _check_reads(self, node: Node) -> None:
        if node.beside is not None:
            raise _refused(
                node.name,
                next(iter(self.lying.values())),
                "computes once more, for a gradient in the forward pass, what may have used",
            )
        for value in node.inputs:
            slot = self.lying.get(value)
            is_elsewhere = slot is not None and node.rank != self._owner_of(slot)
            if slot is not None and is_elsewhere and node not in self.views:
                raise _refused(node.name, slot, "reads, on another partition,")


def written_in_place(graph: Graph, node: Node) -> list[Slot]:
    """Returns the parameters, and buffers of whole modules, that a call between modules writes to.

    Args:
        graph: that has it.
        node: the call.
    """
    if node.kind is not NodeKind.CALL:
        return []
    return [
        value.node.target
        for value in changed_attributes(node)
        if not value.replicated and value.node.target not in graph.buffers
    ]


def parameters_in_turn(graph: Graph) -> list[str]:
    """Says which writes to parameters have microbatches run one after the other."""
    written = (slot for node in graph.nodes for slot in written_in_place(graph, node))
    return [f"code between modules writes to {_title(slot)}" for slot in dict.fromkeys(written)]


def _check_write(node: Node, slot: Slot, before: Iterable[Node]) -> None:
    if node.region is not None:
        raise _refused(node.name, slot, "writes, in a checkpointed call that is split, to")
    if any(isinstance(value.source, Value) for value in node.outputs):
        raise _refused(node.name, slot, "changes the shape, the type or the gradient of")
    if node.parted and any(_keeps_for_gradients(each, slot) for each in before):
        raise _refused(node.name, slot, "gives other memory, behind what has a gradient by it, to")


def _uses(node: Node, slot: Slot) -> bool:
    """Whether a call computes with a parameter."""
    parameter = getattr(*slot)
    own = (each for module in node.modules for each in module._parameters.values())
    return (
        any(each is parameter for each in own)
        or any(slot[0] is module for module in node.modules)
        or slot in node.reached
        or any(value.node.target == slot for value in node.inputs)
    )


def _keeps_for_gradients(node: Node, slot: Slot) -> bool:
    """Whether a call may keep a parameter for its backward pass."""
    # A frozen one, too: that of its other arguments is computed with it.
    return any(value.requires_grad for value in node.outputs) and _uses(node, slot)


def _in_several_segments(graph: Graph) -> list[Node]:
    """Returns the calls in checkpointed ones that are split: one process computes all of it again.

    Here each part is, of what it was given.
    """
    segments: dict[int, set[int]] = collections.defaultdict(set)
    inside = [node for node in graph.nodes if node.region is not None and node.segment >= 0]
    for node in inside:
        assert node.region is not None
        segments[node.region.number].add(node.segment)
    return [node for node in inside if node.region and len(segments[node.region.number]) > 1]


def _check_parted(graph: Graph, taken: Iterable[Value]) -> None:
    """Refuses reading what an assignment to ``.data`` has had share memory, or share it no more.

    Here a parameter keeps its memory, and takes the numbers.
    """
    last_read = {value: node.index for node in graph.nodes for value in node.inputs}
    last_read |= dict.fromkeys(taken, len(graph.nodes))
    for node in graph.nodes:
        for value in node.parted:
            if last_read.get(value, -1) > node.index:
                raise UnsupportedError(
                    f"an assignment to .data while a pipelined step runs ({node.name}) is followed "
                    "by code that reads what shares memory with the tensor that was assigned, or "
                    "with the one before. Write to the parameter instead "
                    "(parameter.data.copy_(...)), or assign a copy (x.clone())."
                )


def _refused(name: str, slot: Slot, does: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} {does} {_title(slot)}, which code between modules changes in the same "
        f"microbatch of a pipelined step. {_REMEDY}"
    )


def _title(slot: Slot) -> str:
    return f"{type(slot[0]).__name__}.{slot[1]}"
