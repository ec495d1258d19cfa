"""The search: every configuration, by how many examples a second it trains, if it fits.

A bound tells of each configuration what no order of its passes takes less than. They are simulated
in the order of their bounds, until none that is left can be among the best; what does not fit
with the fewest activations that any order keeps is not simulated at all.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.planning.choosing import fastest, kinds_of, lean_or_fastest
from smdistributed.modelparallel.common.planning.list_scheduling import CostModel, PassGraph
from smdistributed.modelparallel.common.planning.schedule import SegmentGraph
from smdistributed.modelparallel.common.planning.simulator import Timeline, simulate
from smdistributed.modelparallel.common.search.candidates import (
    Configuration,
    Pipelines,
    configurations,
    with_more_checkpoints,
)
from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.profile import ModelProfile
from smdistributed.modelparallel.common.search.rank_memory import Held, RankMemory, fullest
from smdistributed.modelparallel.common.search.stages import Cutter, Stages, segment_graph
from smdistributed.modelparallel.common.search.step_time import StepTime

#: Two times that differ by less are equal, as far as an estimate knows.
_EQUAL = 0.02
#: Microbatches that are simulated beyond one for each rank of a pipeline: then it is in its stride,
#: and each further one takes what the busiest rank takes for it.
_STRIDE = 8
#: Passes that are simulated for a configuration, but for those of a few policies.
_TASK_BUDGET = 10_000
#: Segments of microbatches for which an order that keeps less is looked for, as a job does.
_MOST_LEAN = 500
#: What takes so many times as long as the best is not worth a line.
_WORTH_A_LINE = 1.3
#: Refusals that a plan tells of.
_MOST_REFUSED = 3


@dataclass(frozen=True)
class Estimate:
    """What a configuration is estimated to do.

    Attributes:
        configuration: of the job.
        seconds: of a step, its update included.
        examples: of a step.
        memory: of each rank of a pipeline, at its fullest.
        idle: share of the time of passes in which ranks wait.
    """

    configuration: Configuration
    seconds: float
    examples: int
    memory: tuple[RankMemory, ...]
    idle: float

    @property
    def rate(self) -> float:
        """Examples a second."""
        return self.examples / self.seconds

    @property
    def peak(self) -> RankMemory:
        """The memory of the fullest rank."""
        return max(self.memory, key=lambda each: each.total)


@dataclass(frozen=True)
class Ranking:
    """The result of a search.

    Attributes:
        best: what fits, the fastest first; of equally fast ones what leaves more memory.
        refused: of what does not fit, for each number of partitions what lacks least.
        num_configurations: that there are.
        num_fitting: that may fit; those beyond the best were not all simulated.
    """

    best: tuple[Estimate, ...]
    refused: tuple[Estimate, ...]
    num_configurations: int
    num_fitting: int

    def times(self, factor: float) -> Ranking:
        """Returns the same if everything takes ``factor`` times as long."""
        best, refused = (
            tuple(dataclasses.replace(each, seconds=factor * each.seconds) for each in estimates)
            for estimates in (self.best, self.refused)
        )
        return dataclasses.replace(self, best=best, refused=refused)


@dataclass(frozen=True, order=True)
class _Bounded:
    """A configuration with what no run of it takes less than."""

    bound: float
    configuration: Configuration
    stages: Stages = field(compare=False)
    time: StepTime = field(compare=False)


class Search:
    """Looks for the configurations of one model on one machine.

    Args:
        profile: of the model.
        machine: what it will run on.
    """

    def __init__(self, profile: ModelProfile, machine: Machine) -> None:
        self._profile = profile
        self._machine = machine
        self._cutter = Cutter(profile, machine.device)
        self._ordered = functools.cache(_ordered)

    def ranking(self, most: int = 10) -> Ranking:
        """Returns the best configurations.

        Args:
            most: how many.

        Raises:
            ConfigError: there is none, whatever the memory is.
        """
        #: By their bounds, what may fit; each configuration with as few checkpoints as that takes.
        open_ones: list[_Bounded] = []
        refused: list[Estimate] = []
        num_configurations = num_fitting = 0
        for configuration in configurations(self._profile, self._machine):
            found = self._least_checkpointed(configuration)
            if isinstance(found, _Bounded):
                heapq.heappush(open_ones, found)
                num_fitting += 1
            elif found is not None:
                refused.append(found)
            num_configurations += found is not None
        if not num_configurations:
            raise ConfigError(
                f"a job shares its batch out among its replicas; {self._profile.batch} examples "
                f"cannot be shared out by any configuration of {self._machine.num_devices} "
                "devices: give the step a batch that is a multiple of them."
            )
        best: list[Estimate] = []
        while open_ones:
            each = heapq.heappop(open_ones)
            slowest = best[-1].seconds if len(best) == most else float("inf")
            if best and each.bound >= min(slowest, _WORTH_A_LINE * best[0].seconds):
                break
            estimate = self._first_estimate(each)
            if self._fits(estimate):
                best = sorted([*best, estimate], key=lambda one: one.seconds)[:most]
                continue
            more = with_more_checkpoints(each.configuration, self._profile)
            found = self._least_checkpointed(more) if more else None
            if isinstance(found, _Bounded):
                heapq.heappush(open_ones, found)
            else:
                refused.append(found or estimate)
                num_fitting -= 1
        best = [self.estimate(each.configuration) for each in best]
        return Ranking(_ranked(best), _least(refused), num_configurations, num_fitting)

    def _first_estimate(self, each: _Bounded) -> Estimate:
        """Returns an estimate by a quick order, or if that does not fit, by one that keeps less."""
        estimate = self._estimate(each)
        return estimate if self._fits(estimate) else self._estimate(each, lean=True)

    def _fits(self, estimate: Estimate) -> bool:
        return estimate.peak.total <= self._machine.memory_bytes

    def estimate(self, configuration: Configuration) -> Estimate:
        """Returns what a configuration is estimated to do, whether it fits or not."""
        found = self._bounded(configuration, fits=True)
        assert isinstance(found, _Bounded)
        return self._estimate(found, lean=True)

    def timeline(self, configuration: Configuration) -> Timeline:
        """Returns the simulated passes of a step."""
        found = self._bounded(configuration, fits=True)
        assert isinstance(found, _Bounded)
        return self._simulated(found, configuration.microbatches, lean=True)

    def _least_checkpointed(self, configuration: Configuration) -> _Bounded | Estimate | None:
        """Returns what ``_bounded`` does, of the fewest checkpoints with which it may fit."""
        found = self._bounded(configuration)
        if isinstance(found, Estimate):
            more = with_more_checkpoints(configuration, self._profile)
            return self._least_checkpointed(more) if more else found
        return found

    def _bounded(
        self, configuration: Configuration, *, fits: bool = False
    ) -> _Bounded | Estimate | None:
        """Returns a configuration with its bound, or an estimate if it cannot fit, or None.

        A model may have too few parts for it.

        Args:
            configuration: of the job.
            fits: whether it is known to fit.
        """
        examples = self._profile.batch // configuration.lanes // configuration.microbatches
        stages = self._cutter.stages(
            configuration.partitions,
            examples,
            configuration.microbatches if configuration.pipeline == "zero_bubble_v" else 0,
            v_shaped=configuration.pipeline == "zero_bubble_v",
            checkpointed_blocks=configuration.checkpointed_blocks,
            slices=configuration.slices,
            optimize=configuration.optimize,
        )
        if stages is None:
            return None
        time = StepTime(stages, configuration, self._profile, self._machine)
        graph = _graph(stages, time, configuration.pipeline)
        shortest = PassGraph(graph, time.transfers).shortest_time(configuration.microbatches)
        bound = shortest + time.beside_passes()
        waiting = _least_waiting(configuration)
        held = [Held.least(rank, stages, waiting) for rank in range(stages.num_ranks)]
        least = fullest(stages, held, configuration, self._profile, self._machine.device)
        if not fits and max(each.total for each in least) > self._machine.memory_bytes:
            return Estimate(configuration, bound, self._profile.batch, least, 0.0)
        return _Bounded(bound, configuration, stages, time)

    def _estimate(self, each: _Bounded, *, lean: bool = False) -> Estimate:
        """Returns what a configuration is estimated to do.

        Args:
            each: the configuration.
            lean: whether its order is looked for as long as a job does, which may keep less.
        """
        configuration = each.configuration
        stride = configuration.microbatches
        if configuration.pipeline != "simple":  # which keeps more with each of them
            stride = min(stride, configuration.partitions + _STRIDE)
        timeline = self._simulated(each, stride, lean=lean)
        graph = _graph(each.stages, each.time, configuration.pipeline)
        loads = PassGraph(graph, CostModel()).loads
        passes = timeline.makespan + (configuration.microbatches - stride) * max(loads)
        return Estimate(
            configuration,
            passes + each.time.beside_passes(),
            self._profile.batch,
            fullest(
                each.stages,
                [Held.by(actions, each.stages) for actions in timeline.schedule.ranks],
                configuration,
                self._profile,
                self._machine.device,
            ),
            max(0.0, 1 - configuration.microbatches * sum(loads) / passes / len(loads)),
        )

    def _simulated(self, each: _Bounded, num_microbatches: int, *, lean: bool) -> Timeline:
        configuration = each.configuration
        graph = _graph(each.stages, each.time, configuration.pipeline)
        active = self._profile.settings.get("active_microbatches", configuration.partitions + 2)
        # Of many ranks two microbatches more or less are a small part of what each keeps.
        lean = lean and len(graph.segments) * num_microbatches <= _MOST_LEAN
        return self._ordered(
            graph, num_microbatches, configuration.pipeline, active, each.time.transfers, lean
        )


def _least_waiting(configuration: Configuration) -> int:
    """Returns how many microbatches wait for their backward passes on each rank, at least."""
    return configuration.microbatches if configuration.pipeline == "simple" else 1


def _graph(stages: Stages, time: StepTime, pipeline: Pipelines) -> SegmentGraph:
    return segment_graph(stages, time.passes, halves=pipeline.startswith("zero_bubble"))


def _ordered(
    graph: SegmentGraph,
    num_microbatches: int,
    pipeline: Pipelines,
    active_microbatches: int,
    transfers: CostModel,
    lean: bool,
) -> Timeline:
    """Returns the order that the library will choose, with the times of the machine's transfers."""
    [kind] = kinds_of(pipeline)
    active_microbatches = min(active_microbatches, num_microbatches)
    given = graph, num_microbatches, kind, active_microbatches
    if lean:
        chosen = lean_or_fastest(*given)
    else:
        chosen = fastest(*given, thorough=False, task_budget=_TASK_BUDGET)
    return simulate(graph, chosen.schedule, num_microbatches, transfers)


def _ranked(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Returns estimates, the fastest first; those that are equally fast by their memory."""
    left = sorted(estimates, key=lambda each: (each.seconds, each.configuration))
    ranked: list[Estimate] = []
    while left:
        equal = [each for each in left if each.seconds <= left[0].seconds * (1 + _EQUAL)]
        left = left[len(equal) :]
        ranked += sorted(
            equal, key=lambda each: (each.peak.total, each.configuration.num_mechanisms)
        )
    return tuple(ranked)


def _least(refused: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Returns what lacks least, by number of partitions, of what does not fit."""
    found: dict[int, Estimate] = {}
    for each in refused:
        key = each.configuration.partitions
        if key not in found or each.peak.total < found[key].peak.total:
            found[key] = each
    return tuple(sorted(found.values(), key=lambda each: each.peak.total))[:_MOST_REFUSED]
