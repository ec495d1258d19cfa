"""Places a model in a V; opens units where it is cut, since whole ones cannot be dealt evenly."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.planning.cost_tree import Group, Node, grouped
from smdistributed.modelparallel.common.planning.sequence import Crossing, Where, loads_of
from smdistributed.modelparallel.common.planning.v_shape import VProblem

# Units are opened for this much less load of the heaviest partition, and so often at most.
_WORTH_OPENING = Fraction(97, 100)
_OPENINGS = 4


def opened_at_cuts(
    root: Node, groups: list[Group], num_partitions: int, delay: int
) -> tuple[list[Group], Where]:
    """Places in a V, and opens units at the cuts, since whole ones cannot be dealt evenly.

    Returns:
        The groups, and the partition of every node.
    """
    where = _place_in_v(groups, num_partitions, delay)
    heaviest = _heaviest(groups, where, delay)
    even = Fraction(root.load, num_partitions) + delay * Fraction(num_partitions - 1, 2)
    # Within a block more may cross than between two: a stream, and what a branch has computed.
    crossing = Crossing(groups)
    starts = [each.position(at_last=False) for each in _behind_cuts(groups, where)]
    most = max(map(crossing.before, starts), default=0)
    for _ in range(_OPENINGS):
        if heaviest * _WORTH_OPENING <= even:
            break
        opened = [node for each in _beside_cuts(groups, where) for node in each.nodes]
        opened = [node for node in opened if node.can_open]
        _set_open(opened, is_open=True)
        finer = grouped(root)
        found = _place_in_v(finer, num_partitions, delay, most)
        lighter = _heaviest(finer, found, delay)
        if not opened or lighter > heaviest * _WORTH_OPENING:
            _set_open(opened, is_open=False)
            break
        _set_open([node for node in opened if _is_together(node, found)], is_open=False)
        groups, where, heaviest = grouped(root), found, lighter
    return groups, where


def _heaviest(groups: Sequence[Group], where: Where, delay: int) -> int:
    loads: dict[int, int] = defaultdict(int)
    for each, load in loads_of(groups).items():
        loads[where[each.nodes[0].position]] += load
    return max(load + delay * rank for rank, load in loads.items())


def _in_sequence(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda each: each.position(at_last=False))


def _behind_cuts(groups: Sequence[Group], where: Where) -> Iterator[Group]:
    """Yields the groups right behind the cuts."""
    for before, each in itertools.pairwise(_in_sequence(groups)):
        if where[before.nodes[0].position] != where[each.nodes[0].position]:
            yield each


def _beside_cuts(groups: Sequence[Group], where: Where) -> list[Group]:
    """Returns the groups before and behind each cut."""
    sequence = _in_sequence(groups)
    behind = {sequence.index(each) for each in _behind_cuts(groups, where)}
    return [sequence[index] for index in sorted(behind | {index - 1 for index in behind})]


def _set_open(nodes: Sequence[Node], *, is_open: bool) -> None:
    for node in nodes:
        node.is_open = is_open


def _is_together(node: Node, where: Where) -> bool:
    """Tells whether all below a node, which has one level open, is where the node is."""
    return all(where[child.position] == where[node.position] for child in node.children)


def _place_in_v(
    groups: Sequence[Group], num_partitions: int, delay: int, most_bytes: int | None = None
) -> Where:
    """As ``_place``, for a V-shaped partition; cuts that more bytes cross are not made."""
    pinned = sorted({each.pin for each in groups if each.pin is not None})
    if pinned:
        raise PartitionError(
            f"A V-shaped partition places every unit itself; received units pinned to {pinned}: "
            "pin none, or give one piece to each rank (pipeline zero_bubble)."
        )
    num_pieces = 2 * num_partitions - 1
    if len(groups) < num_pieces:
        raise PartitionError(
            f"A V-shaped partition over {num_partitions} ranks has {num_pieces} pieces; received a "
            f"model with {len(groups)} parts that can lie apart: use fewer ranks, or give one "
            "piece to each (pipeline zero_bubble)."
        )
    loads, crossing = loads_of(groups), Crossing(groups)
    runs: list[list[Group]] = []
    runs_bytes: list[int] = []
    for each in _in_sequence(groups):
        num_bytes = crossing.before(each.position(at_last=False))
        if runs and most_bytes is not None and num_bytes > most_bytes:
            runs[-1].append(each)
        else:
            runs.append([each])
            runs_bytes.append(num_bytes)
    problem = VProblem(
        loads=[sum(loads[each] for each in run) for run in runs],
        is_avoided=[not any(each.has_parameters for each in run) for run in runs],
        crossing_bytes=runs_bytes,
        num_ranks=num_partitions,
        delay=delay,
    )
    where = {}
    for part, (begin, end) in enumerate(problem.cuts()):
        for each in itertools.chain(*runs[begin:end]):
            where.update({node.position: part for node in each.nodes})
    return where
