"""Decides which partition holds which part of a model, from measured costs alone.

The model is a tree of units (modules, or the operations of a layer). It is opened from the root
down; what remains is a sequence in the order of execution, which is cut into contiguous partitions
so that the heaviest one is as light as possible. Units that share a parameter stay together. In a
V-shaped partition each rank has two pieces of the sequence, the outermost ones the first rank.

Source: model-parallel-core-features.md, Automated Model Splitting with PyTorch
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.planning.contiguous import CutProblem
from smdistributed.modelparallel.common.planning.cost_tree import (
    Group,
    Unit,
    flatten,
    open_and_group,
)
from smdistributed.modelparallel.common.planning.sequence import Crossing, Where, loads_of
from smdistributed.modelparallel.common.planning.v_placement import opened_at_cuts

__all__ = ["Assignment", "PlacedUnit", "Unit", "partition"]

# A tied group moves from its first unit to its last only for this much less load: the first
# partition receives the inputs of the model, and small differences are noise of the measurement.
_WORTH_MOVING = Fraction(99, 100)
# Of what a microbatch computes, about.
_FORWARD_SHARE = Fraction(1, 3)
# Tied groups, the heaviest first, for which the last unit is tried as well.
_MOVABLE_GROUPS = 16


@dataclass(frozen=True)
class PlacedUnit:
    """A unit of the chosen granularity and its partition.

    Attributes:
        name: of the unit.
        partition: that holds it.
        compute: of the whole unit; of the container alone where it is split.
        memory: the same for memory.
        is_split: whether this is a container whose children are placed by themselves, so that
            only what it holds itself is meant.
    """

    name: str
    partition: int
    compute: float
    memory: float
    is_split: bool = False


@dataclass(frozen=True)
class Assignment:
    """Where everything is.

    Attributes:
        placed: all units of the chosen granularity and all split containers, in the order of
            execution.
        num_partitions: including empty ones.
        memory_weight: share of memory in the costs.
    """

    placed: tuple[PlacedUnit, ...]
    num_partitions: int
    memory_weight: float

    @cached_property
    def units(self) -> Mapping[str, int]:
        """Partition of every outermost unit that sits whole on one."""
        return {unit.name: unit.partition for unit in self.placed if not unit.is_split}

    @cached_property
    def containers(self) -> Mapping[str, int]:
        """Partition of what every split container holds itself."""
        return {unit.name: unit.partition for unit in self.placed if unit.is_split}

    @cached_property
    def compute_shares(self) -> tuple[float, ...]:
        """Each partition's share of all computation; zeros where there is none."""
        return self._shares([unit.compute for unit in self.placed])

    @cached_property
    def memory_shares(self) -> tuple[float, ...]:
        """Each partition's share of all memory; zeros where there is none."""
        return self._shares([unit.memory for unit in self.placed])

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Each partition's weighted share."""
        return tuple(
            self.memory_weight * memory + (1 - self.memory_weight) * compute
            for memory, compute in zip(self.memory_shares, self.compute_shares, strict=True)
        )

    @property
    def cost(self) -> float:
        """The weighted share of the heaviest partition, which was minimised."""
        return max(self.costs)

    def _shares(self, amounts: Sequence[float]) -> tuple[float, ...]:
        sums = [0.0] * self.num_partitions
        for unit, amount in zip(self.placed, amounts, strict=True):
            sums[unit.partition] += amount
        total = sum(sums)
        return tuple(amount / total if total else 0.0 for amount in sums)


def partition(
    root: Unit,
    num_partitions: int,
    memory_weight: float,
    *,
    v_shaped: bool = False,
    num_microbatches: int | None = None,
) -> Assignment:
    """Assigns every unit to a partition.

    The largest of ``memory_weight * memory_share + (1 - memory_weight) * compute_share`` over the
    partitions is the least possible for contiguous partitions of the sequence. Between equal
    solutions, one whose partitions do not begin with a unit without parameters wins (these follow
    their producer); then the one that is most even over all partitions; then one with fewer bytes
    across its cuts; then the one with earlier cuts.

    Pinned units are where they were pinned, and their load counts; the others are contiguous among
    themselves. Units that share a parameter move together, as one item at the place of the first
    of them, or of the last where that is better. What a split container holds itself goes where it
    is pinned, or else with the first unit below it. Every partition gets a unit if there are
    enough; if not, the last ones stay empty.

    A V-shaped partition cuts the sequence into twice as many pieces, of which partition 0 has the
    first and the last, partition 1 the second and the last but one, and the last partition the two
    in the middle, which are one piece. The heaviest partition is as light as can be, and the pieces
    are about even. Units at the cuts are opened where that makes the heaviest partition lighter.
    Where the number of microbatches is known, what a partition waits at first counts as its load:
    each begins a forward pass of a piece later than the one before.

    Args:
        root: of the tree.
        num_partitions: how many there are.
        memory_weight: share of memory in the costs, 0 to 1.
        v_shaped: whether the partitions go up the sequence and come back.
        num_microbatches: of a mini-batch, for a V.

    Raises:
        PartitionError: an argument is out of range, or pins contradict shared parameters; a
            V-shaped partition is to have pins, or has fewer units than pieces.

    Source: model-parallel-core-features.md, Automated Model Splitting with PyTorch
    """
    if num_partitions < 1:
        raise PartitionError(
            f"A model has at least one partition; received {num_partitions}: use 1 or more."
        )
    if not 0.0 <= memory_weight <= 1.0:
        raise PartitionError(
            f"memory_weight is from 0.0 to 1.0; received {memory_weight}: use a value within."
        )
    nodes = flatten(root, num_partitions, memory_weight)
    if v_shaped:
        groups = open_and_group(nodes, 2 * num_partitions)
        delay = Fraction()
        if num_microbatches is not None:
            share = 1 - Fraction(memory_weight).limit_denominator(10**6)
            num_pieces = 2 * num_partitions * num_microbatches
            delay = nodes.load * share * _FORWARD_SHARE / num_pieces
        groups, where = opened_at_cuts(nodes, groups, num_partitions, int(delay))
    else:
        groups = open_and_group(nodes, num_partitions)
        where = _place(groups, num_partitions)
    members = sorted((node for group in groups for node in group.nodes), key=lambda n: n.position)
    return Assignment(
        tuple(
            PlacedUnit(
                node.unit.name,
                where[node.position],
                node.held_compute,
                node.held_memory,
                node.is_open,
            )
            for node in members
        ),
        num_partitions,
        memory_weight,
    )


def _place(groups: Sequence[Group], num_partitions: int) -> Where:
    """The partition of every node, by its position."""
    loads = loads_of(groups)
    base_loads = [0] * num_partitions
    where = {}
    for group in groups:
        if group.pin is not None:
            base_loads[group.pin] += loads[group]
            where.update({node.position: group.pin for node in group.nodes})
    free = [group for group in groups if group.pin is None]
    pinned = {group.pin for group in groups}
    unpinned = [part for part in range(num_partitions) if part not in pinned]
    needy = set(unpinned[: len(free)])
    crossing = Crossing(groups)

    def problem(last: set[Group]) -> tuple[list[Group], CutProblem]:
        sequence = sorted(free, key=lambda group: group.position(group in last))
        return sequence, CutProblem(
            loads=[loads[group] for group in sequence],
            is_avoided=[not group.has_parameters for group in sequence],
            crossing_bytes=[crossing.before(group.position(group in last)) for group in sequence],
            base_loads=base_loads,
            needs_item=[part in needy for part in range(num_partitions)],
        )

    last: set[Group] = set()
    movable = sorted((group for group in free if group.is_tied), key=lambda group: -loads[group])
    least = problem(last)[1].bottleneck()
    for group in movable[:_MOVABLE_GROUPS]:
        moved = problem(last | {group})[1].bottleneck()
        if moved < least * _WORTH_MOVING:
            last.add(group)
            least = moved
    sequence, chosen = problem(last)
    cuts = chosen.cuts()
    for part, (begin, end) in enumerate(itertools.pairwise(cuts)):
        for group in sequence[begin:end]:
            where.update({node.position: part for node in group.nodes})
    return where
