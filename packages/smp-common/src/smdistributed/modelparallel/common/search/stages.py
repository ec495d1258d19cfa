"""A model cut over the ranks of a pipeline: what each rank holds, and what it computes in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
from smdistributed.modelparallel.common.planning.pass_memory import PassMemory
from smdistributed.modelparallel.common.planning.pass_tape import Span, without
from smdistributed.modelparallel.common.planning.schedule import Edge, Segment, SegmentGraph
from smdistributed.modelparallel.common.search.devices import Device
from smdistributed.modelparallel.common.search.profile import (
    Computation,
    Figures,
    ModelProfile,
    UnitProfile,
)
from smdistributed.modelparallel.common.search.unit_tape import with_tape

_LONGER = {"half": 1, "tf32": LONGER_IN_TF32, "single": LONGER_IN_SINGLE}


@dataclass(frozen=True)
class Piece:
    """A run of units on one rank, which a microbatch passes in one go.

    Attributes:
        rank: that has it.
        figures: of all its units.
        memory: what its passes hold.
        output_bytes: what crosses the cut behind it.
    """

    rank: int
    figures: Figures
    memory: PassMemory
    output_bytes: float


@dataclass(frozen=True)
class Stages:
    """A model over the ranks of a pipeline, for microbatches of one size.

    Attributes:
        pieces: in the order of execution.
        holdings: for every rank, the figures of all that it has.
    """

    pieces: tuple[Piece, ...]
    holdings: tuple[Figures, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.holdings)

    def largest_crossing(self, rank: int) -> float:
        """Returns the most bytes that come to a rank, or go from it, in one transfer."""
        pairs = itertools.pairwise(self.pieces)
        crossing = (one.output_bytes for one, other in pairs if rank in (one.rank, other.rank))
        return max(crossing, default=0.0)


class _Sums:
    """What the units of a model, and all that lies below each, come to.

    Args:
        profile: of the model, with a tape.
        slices: that ranks share.
    """

    def __init__(self, profile: ModelProfile, slices: int) -> None:
        assert profile.tape is not None
        self._tape = profile.tape
        self._gathered = slices - 1
        self._units = {unit.name: unit for unit in profile.root.walk()}
        self._own = {name: unit.own.in_slices(slices) for name, unit in self._units.items()}
        self._all: dict[str, Figures] = {}
        self._sum_up(profile.root)
        inside = [span for unit in self._units.values() for span in unit.spans]
        self._beside = without([(0, self._tape.num_operations)], inside)

    def figures(self, placed: PlacedUnit) -> Figures:
        """Returns the figures of what lies with a unit: its own alone, where it is split."""
        return self._own[placed.name] if placed.is_split else self._all[placed.name]

    def memory(self, run: Sequence[PlacedUnit], *, is_last: bool) -> PassMemory:
        """Returns what the passes of a run of units hold.

        Args:
            run: the units.
            is_last: whether what the step function computes itself is computed with them.
        """
        parts = list(itertools.chain.from_iterable(map(self._parts, run)))
        if is_last and self._beside:
            parts.append((self._beside, None))
        parts.sort(key=lambda part: part[0][0])
        found = PassMemory()
        for (given, _), together in itertools.groupby(parts, key=_kind_of):
            spans = [span for part, _ in together for span in part]
            memory = self._tape.memory(spans)
            found = found.then(memory if given is None else memory.again(given))
        exchanged = sum(self.figures(placed).exchanged_bytes for placed in run)
        return found.beside(self._gathered * exchanged)

    def _parts(self, placed: PlacedUnit) -> Iterator[tuple[Sequence[Span], UnitProfile | None]]:
        """Yields operations of what lies with a unit, each with the unit that is computed again."""
        unit = self._units[placed.name]
        if placed.is_split:
            yield from ((unit.spans, None),) if unit.spans else ()
            return
        yield from self._parts_below(unit)

    def _parts_below(
        self, unit: UnitProfile
    ) -> Iterator[tuple[Sequence[Span], UnitProfile | None]]:
        if unit.is_again:
            spans = [span for each in unit.walk() for span in each.spans]
            yield from ((spans, unit),) if spans else ()
            return
        for span in unit.spans:
            yield [span], None
        for child in unit.children:
            yield from self._parts_below(child)

    def _sum_up(self, unit: UnitProfile) -> Figures:
        below = map(self._sum_up, unit.children)
        self._all[unit.name] = figures = _total([self._own[unit.name], *below])
        return figures


def _kind_of(part: tuple[Sequence[Span], UnitProfile | None]) -> tuple[float | None, str]:
    """Returns what parts in a row must share to be one: with a unit, what it is given."""
    unit = part[1]
    return (None, "") if unit is None else (unit.output_bytes, unit.name)


class Cutter:
    """Cuts a model into stages, as the library will.

    Args:
        profile: of the model.
        device: that it will be on.
    """

    def __init__(self, profile: ModelProfile, device: Device) -> None:
        self._profile = profile = with_tape(profile)
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
        runs = [
            (rank, list(run))
            for rank, run in itertools.groupby(computing, key=lambda unit: unit.partition)
        ]
        # What the step function computes itself is computed where the model has ended.
        beside = self._profile.beside.times(factor)
        for place, (rank, units) in enumerate(runs):
            is_last = place == len(runs) - 1
            figures = _total(map(sums.figures, units)).times(factor)
            figures = figures + beside if is_last else figures
            memory = sums.memory(units, is_last=is_last).times(factor)
            pieces.append(Piece(rank, figures, memory, factor * self._outputs[units[-1].name]))
        by_rank: list[list[PlacedUnit]] = [[] for _ in range(assignment.num_partitions)]
        for unit in assignment.placed:
            by_rank[unit.partition].append(unit)
        holdings = [_total(map(sums.figures, units)).times(factor) for units in by_rank]
        if pieces:
            holdings[pieces[-1].rank] += beside
        return Stages(tuple(pieces), tuple(holdings))

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
            activation_bytes=round(piece.memory.kept),
            weight_cost=(costs.weights or None) if halves else None,
        )
        for index, (piece, costs) in enumerate(zip(stages.pieces, passes, strict=True))
    )
    edges = tuple(
        Edge(index, index + 1, num_bytes=round(piece.output_bytes), has_grad=True)
        for index, piece in enumerate(stages.pieces[:-1])
    )
    return SegmentGraph(segments, edges, stages.num_ranks)


def _total(figures: Iterable[Figures]) -> Figures:
    return sum(figures, Figures())
