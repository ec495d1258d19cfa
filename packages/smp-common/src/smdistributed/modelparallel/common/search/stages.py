"""A model cut over the ranks of a pipeline: what each rank holds, and what it computes in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.planning.cost_tree import STATE_FACTOR
from smdistributed.modelparallel.common.planning.partitioner import (
    Assignment,
    PlacedUnit,
    Unit,
    partition,
)
from smdistributed.modelparallel.common.planning.pass_costs import (
    LONGER_IN_SINGLE,
    LONGER_IN_TF32,
    OPERATIONS_A_BYTE,
    PassCosts,
)
from smdistributed.modelparallel.common.planning.schedule import Edge, Segment, SegmentGraph
from smdistributed.modelparallel.common.search.devices import Device
from smdistributed.modelparallel.common.search.profile import (
    Computation,
    Figures,
    ModelProfile,
    UnitProfile,
)

_LONGER = {"half": 1, "tf32": LONGER_IN_TF32, "single": LONGER_IN_SINGLE}


@dataclass(frozen=True)
class Piece:
    """A run of units on one rank, which a microbatch passes in one go.

    Attributes:
        rank: that has it.
        figures: of all its units.
        output_bytes: what crosses the cut behind it.
    """

    rank: int
    figures: Figures
    output_bytes: float


@dataclass(frozen=True)
class Stages:
    """A model over the ranks of a pipeline, for microbatches of one size.

    Attributes:
        pieces: in the order of execution.
        holdings: for every rank, the figures of all that it has.
        working_bytes: for every rank, what the largest of its units makes in a pass.
    """

    pieces: tuple[Piece, ...]
    holdings: tuple[Figures, ...]
    working_bytes: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.holdings)

    def crossing_bytes(self, rank: int) -> float:
        """Returns what a microbatch brings to a rank and takes from it."""
        pairs = itertools.pairwise(self.pieces)
        return sum(one.output_bytes for one, other in pairs if rank in (one.rank, other.rank))


class _Sums:
    """The figures of the units of a model, and of all that lies below each.

    Args:
        profile: of the model.
        slices: that ranks share.
    """

    def __init__(self, profile: ModelProfile, slices: int) -> None:
        self._own = {unit.name: unit.own.in_slices(slices) for unit in profile.root.walk()}
        self._all: dict[str, Figures] = {}
        self._most_made: dict[str, float] = {}
        self._sum_up(profile.root)

    def figures(self, placed: PlacedUnit) -> Figures:
        """Returns the figures of what lies with a unit: its own alone, where it is split."""
        return self._own[placed.name] if placed.is_split else self._all[placed.name]

    def made(self, placed: PlacedUnit) -> float:
        """Returns the most that a module makes itself, of what lies with a unit."""
        if placed.is_split:
            return _made(self._own[placed.name])
        return self._most_made[placed.name]

    def _sum_up(self, unit: UnitProfile) -> tuple[Figures, float]:
        below = [self._sum_up(child) for child in unit.children]
        own = self._own[unit.name]
        self._all[unit.name] = figures = _total([own, *(each for each, _ in below)])
        most = max([_made(own), *(each for _, each in below)])
        self._most_made[unit.name] = most
        return figures, most


class Cutter:
    """Cuts a model into stages, as the library will.

    Args:
        profile: of the model.
        device: that it will be on.
    """

    def __init__(self, profile: ModelProfile, device: Device) -> None:
        self._profile = profile
        self._device = device
        self._outputs = {unit.name: unit.output_bytes for unit in profile.root.walk()}
        self._sums_of = functools.cache(
            lambda every, slices: _Sums(profile.with_checkpoints(every), slices)
        )
        self._tree_of = functools.cache(self._tree)
        self._assigned = functools.cache(self._assignment)
        self.stages = functools.cache(self._stages)

    def _stages(
        self,
        partitions: int,
        examples: int,
        microbatches: int,
        *,
        v_shaped: bool,
        checkpointed_blocks: int = 0,
        slices: int = 1,
        optimize: str | None = None,
    ) -> Stages | None:
        """Returns the stages of a model; None where it cannot be cut so.

        Args:
            partitions: how many ranks there are.
            examples: of a microbatch.
            microbatches: of a replica's batch.
            v_shaped: whether each rank has two pieces.
            checkpointed_blocks: every so manieth block is computed again; the cuts are the same.
            slices: that ranks share; likewise.
            optimize: what the partitions balance, where a framework has several ways.
        """
        assignment = self._assigned(partitions, examples, microbatches, v_shaped, optimize)
        if assignment is None:
            return None
        sums = self._sums_of(checkpointed_blocks, slices)
        return self._from(assignment, sums, examples / self._profile.examples)

    def _assignment(
        self,
        partitions: int,
        examples: int,
        microbatches: int,
        v_shaped: bool,
        optimize: str | None,
    ) -> Assignment | None:
        profile = self._profile
        weight = profile.memory_weight if optimize is None else profile.memory_weights[optimize]
        try:
            assignment = partition(
                self._tree_of(examples, optimize),
                partitions,
                weight,
                v_shaped=v_shaped,
                num_microbatches=microbatches if v_shaped else None,
            )
        except PartitionError:
            return None
        if len({unit.partition for unit in assignment.placed}) < partitions:
            return None  # some rank would have nothing
        return assignment

    def _from(self, assignment: Assignment, sums: _Sums, factor: float) -> Stages:
        pieces = []
        computing = [
            unit for unit in assignment.placed if sums.figures(unit).computation != Computation()
        ]
        for rank, run in itertools.groupby(computing, key=lambda unit: unit.partition):
            units = list(run)
            figures = _total(map(sums.figures, units)).times(factor)
            pieces.append(Piece(rank, figures, factor * self._outputs[units[-1].name]))
        # What the step function computes itself is computed where the model has ended.
        beside = self._profile.beside.times(factor)
        if pieces:
            pieces[-1] = replace(pieces[-1], figures=pieces[-1].figures + beside)
        by_rank: list[list[PlacedUnit]] = [[] for _ in range(assignment.num_partitions)]
        for unit in assignment.placed:
            by_rank[unit.partition].append(unit)
        holdings = [_total(map(sums.figures, units)).times(factor) for units in by_rank]
        working = [factor * max(map(sums.made, units), default=0.0) for units in by_rank]
        if pieces:
            last_rank = pieces[-1].rank
            holdings[last_rank] += beside
            working[last_rank] = max(working[last_rank], _made(beside))
        return Stages(tuple(pieces), tuple(holdings), tuple(working))

    def _tree(self, examples: int, optimize: str | None) -> Unit:
        return self._unit(self._profile.root, examples / self._profile.examples, optimize)

    def _unit(self, unit: UnitProfile, factor: float, optimize: str | None) -> Unit:
        if optimize is None:
            own = unit.own.times(factor)
            both = counted(own.computation, self._device, self._profile.precision).both
            compute = float(round(both))
            memory = float(round(STATE_FACTOR * own.parameter_bytes + own.made_bytes))
        else:
            compute, memory = unit.balanced[optimize]
        return Unit(
            unit.name,
            compute=compute,
            memory=memory,
            order=unit.order,
            shared=frozenset(unit.shared),
            children=tuple(self._unit(child, factor, optimize) for child in unit.children),
            output_bytes=round(factor * unit.output_bytes),
            splittable=unit.splittable,
        )


def counted(work: Computation, device: Device, precision: str) -> PassCosts:
    """Returns the costs of passes in operations, as partitions are balanced by them."""
    longer = _LONGER[precision] if device.is_gpu else 1
    moved = OPERATIONS_A_BYTE * work.moved_bytes if device.is_gpu else 0.0
    return PassCosts.counted(longer * work.of_weights, longer * work.of_others + moved)


def segment_graph(stages: Stages, passes: Sequence[PassCosts], *, halves: bool) -> SegmentGraph:
    """Returns what the simulator takes.

    Args:
        stages: of a microbatch.
        passes: the seconds of each piece.
        halves: whether backward passes are two.
    """
    segments = tuple(
        Segment(
            index,
            piece.rank,
            forward_cost=costs.forward,
            backward_cost=costs.backward - (costs.weights if halves else 0.0),
            has_backward=True,
            activation_bytes=round(piece.figures.kept_bytes),
            weight_cost=(costs.weights or None) if halves else None,
        )
        for index, (piece, costs) in enumerate(zip(stages.pieces, passes, strict=True))
    )
    edges = tuple(
        Edge(index, index + 1, num_bytes=round(piece.output_bytes), has_grad=True)
        for index, piece in enumerate(stages.pieces[:-1])
    )
    return SegmentGraph(segments, edges, stages.num_ranks)


def _made(own: Figures) -> float:
    return own.made_bytes + own.again_bytes


def _total(figures: Iterable[Figures]) -> Figures:
    return sum(figures, Figures())
