"""What of a segment is computed again in its backward pass, and what that does to state.

A checkpointed call that lies on several partitions is computed again part by part. State that a
module keeps must end as in one process, where the call is computed again as a whole.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator, Sequence

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.calls.regions import Again, Region
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind
from smdistributed.modelparallel.torch.trial.turns import keeps_state

#: What computes nothing may come before a region, wherever it was first read.
_GIVEN = (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.ATTRIBUTE)


def parts_of(nodes: Sequence[Node]) -> Iterator[tuple[Region | None, list[Node]]]:
    """Divides the nodes of a segment into parts of regions, and what lies between them."""
    part: list[Node] = []
    given: list[Node] = []
    region: Region | None = None
    for node in nodes:
        if region is not None and node.region is None and node.kind in _GIVEN:
            given.append(node)
            continue
        if part and _number(node.region) != _number(region):
            yield from _with_given(region, part, given)
            part, given = [], []
        region = node.region
        part.append(node)
    yield from _with_given(region, part, given)


def can_repeat(nodes: Sequence[Node]) -> bool:
    """Whether nodes can run again in the backward pass, and find everything as it was.

    Not if they change a tensor from outside in place; and not worth it where no gradient passes.
    Objects that travel through the microbatch, such as a cache, are copied for that.
    """
    made = {value for node in nodes for value in node.outputs}
    return not all(node.replicated for node in nodes) and not any(
        any(value not in made for value in node.changes) for node in nodes
    )


def how_again(graph: Graph, part: Sequence[Node]) -> Again:
    """Returns how a part of a region is computed again.

    Where it keeps state, as in one process: so to the end, if more of the region follows. Else it
    makes no difference, and it is computed as far as is needed.
    """
    region, last = part[0].region, part[-1]
    assert region is not None
    if not any(node.stateful for node in part):
        return Again.AS_NEEDED
    if region.how is Again.AS_NEEDED and any(_follows(node, last) for node in graph.nodes):
        return Again.TO_THE_END
    return region.how


def check_recomputed(graph: Graph, backward: Container[int]) -> None:
    """Refuses regions whose state would end otherwise than in one process.

    Args:
        graph: has its segments.
        backward: the segments that have a backward pass.

    Raises:
        UnsupportedError: there is one.
    """
    parts: dict[int, list[list[Node]]] = collections.defaultdict(list)
    for segment in sorted({node.segment for node in graph.nodes} - {-1}):
        own = [node for node in graph.nodes if node.segment == segment]
        for region, part in parts_of(own):
            if region is not None and segment in backward:
                parts[region.number].append(part)
    for several in parts.values():
        _check_handed_on(several)
        keeping = [part for part in several if any(node.stateful for node in part)]
        for part in keeping:
            _check_part(part, alone=len(several) == 1)
        _check_order(keeping)


def _check_part(part: Sequence[Node], *, alone: bool) -> None:
    for node in part:
        if node.stateful and node.region is not None and node.region.depth > 1:
            raise _refused(node, "in two checkpointed calls, one inside the other")
    node = next(node for node in part if node.stateful)
    if not can_repeat(part):
        raise _refused(
            node,
            "together with code that cannot be computed again, since it changes a tensor from "
            "outside in place",
        )
    made = {value for each in part for value in each.outputs}
    given = {value for each in part for value in each.inputs} - made
    needed = given if node.region is not None and node.region.how is Again.REENTRANT else made
    if not alone and not any(value.requires_grad for value in needed):
        raise _refused(node, "on a partition of the checkpointed call that gets no gradients")


def _check_handed_on(parts: Sequence[Sequence[Node]]) -> None:
    """Refuses a module that gives something else again, to those of the call that lie elsewhere."""
    for part in parts[:-1]:
        for node in part:
            if keeps_state(node.stateful):
                raise _refused(node, "together with modules on another partition that follow it")


def _check_order(parts: Sequence[Sequence[Node]]) -> None:
    """Refuses a module whose calls would be computed again in another order."""
    seen: dict[nn.Module, int] = {}
    for number, part in enumerate(parts):
        for node in part:
            for module in node.stateful:
                if seen.setdefault(module, number) != number:
                    raise _refused(node, "on both sides of another partition")


def _refused(node: Node, how: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.name} keeps state that its calls change (running statistics, counters), and is "
        f"checkpointed {how}: its state would not be that of one process, which changes it again "
        "when it computes the call again. Checkpoint that module alone, or not at all."
    )


def _number(region: Region | None) -> int | None:
    return None if region is None else region.number


def _with_given(
    region: Region | None, part: list[Node], given: list[Node]
) -> Iterator[tuple[Region | None, list[Node]]]:
    if given:
        yield None, given
    if part:
        yield region, part


def _follows(node: Node, last: Node) -> bool:
    """Whether a node is in a later part of the region of another one."""
    return _number(node.region) == _number(last.region) and node.segment > last.segment
