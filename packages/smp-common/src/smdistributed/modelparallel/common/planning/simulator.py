"""Discrete-event dry run of a pipeline: plans an order of actions, times it, finds deadlocks.

Nothing is executed and nothing is sent. A rank executes one action at a time; a value that crosses
ranks arrives a latency and a transfer time after its maker ended; transfers overlap with
computation. The result depends on the arguments alone, so every rank may compute it for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from smdistributed.modelparallel.common.errors import ScheduleDeadlock, ScheduleError
from smdistributed.modelparallel.common.planning.list_scheduling import (
    CostModel,
    PassGraph,
    interleaved_policies,
    list_schedule,
    simple_policies,
    zero_bubble_policies,
)
from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Kind,
    Schedule,
    SegmentGraph,
)

__all__ = [
    "CostModel",
    "Pipeline",
    "TimedAction",
    "Timeline",
    "Transfer",
    "build_schedule",
    "simulate",
]

#: How an order is looked for.
Pipeline = Literal["simple", "interleaved", "zero_bubble"]

# Tasks that planning may simulate in all: several policies for a small plan, few for a large one.
_TASK_BUDGET = 1_000_000
_MIN_POLICIES = 4
# The same where backward passes are two: there are many policies, and bounds of what is kept.
_HALVES_BUDGET = 50_000
#: Sums of the same costs in other orders differ by less.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TimedAction:
    """An action with its start and end, simulated or measured."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """What goes from one rank to another between two of their actions.

    Attributes:
        source: the action that makes it.
        target: the first action there that reads it.
        num_bytes: its size.
    """

    source: Action
    target: Action
    num_bytes: int


@dataclass(frozen=True)
class Timeline:
    """When every action of a mini-batch starts and ends, simulated or measured.

    Attributes:
        ranks: for every pipeline rank, its actions in order of time.
        activation_bytes: for every segment, what a microbatch keeps from forward to backward; empty
            where it is not known.
        kept: for every segment, its share in what its rank keeps of a microbatch.
        measured_transfers: what went between ranks; empty where it is simulated.
        graph: what was simulated; None where it was measured.
    """

    ranks: tuple[tuple[TimedAction, ...], ...]
    activation_bytes: tuple[int, ...] = ()
    kept: tuple[float, ...] = ()
    measured_transfers: tuple[Transfer, ...] = ()
    graph: SegmentGraph | None = None

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        timed = [one for actions in self.ranks for one in actions]
        if not timed:
            return 0.0
        return max(one.end for one in timed) - min(one.start for one in timed)

    @cached_property
    def bubble_fractions(self) -> tuple[float, ...]:
        """For every rank, the share of the makespan in which it executes nothing."""
        if not self.makespan:
            return (0.0,) * len(self.ranks)
        return tuple(
            1.0 - sum(one.end - one.start for one in actions) / self.makespan
            for actions in self.ranks
        )

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which nothing is executed."""
        return sum(self.bubble_fractions) / len(self.ranks) if self.ranks else 0.0

    @cached_property
    def peak_active_microbatches(self) -> tuple[int, ...]:
        """For every rank, the most microbatches begun and not finished on it at one time."""
        peaks = []
        for actions in self.ranks:
            left: dict[int, int] = defaultdict(int)
            for one in actions:
                left[one.action.microbatch] += 1
            begun: set[int] = set()
            peak = 0
            for one in actions:
                microbatch = one.action.microbatch
                begun.add(microbatch)
                peak = max(peak, len(begun))
                left[microbatch] -= 1
                if not left[microbatch]:
                    begun.remove(microbatch)
            peaks.append(peak)
        return tuple(peaks)

    @cached_property
    def peak_activation_bytes(self) -> tuple[int, ...]:
        """For every rank, the most activation memory held at one time.

        A forward pass takes its segment's memory; the end of the last pass of the segment returns
        it.
        """
        return tuple(map(int, self._peaks(self.activation_bytes)))

    @cached_property
    def peak_kept(self) -> tuple[float, ...]:
        """The same in what the rank keeps of one microbatch."""
        return self._peaks(self.kept)

    def _peaks(self, sizes: Sequence[float]) -> tuple[float, ...]:
        if not sizes:
            return (0.0,) * len(self.ranks)
        peaks = []
        for actions in self.ranks:
            completed = {one.action.segment for one in actions if one.action.kind.completes}
            held = peak = 0.0
            for one in actions:
                size = sizes[one.action.segment]
                if one.action.kind is Kind.FORWARD:
                    held += size
                    peak = max(peak, held)
                if one.action.kind.completes or one.action.segment not in completed:
                    held -= size
            peaks.append(peak)
        return tuple(peaks)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What goes between ranks, in no order."""
        if self.graph is None:
            return self.measured_transfers
        return _transfers(self.graph, {one.action for row in self.ranks for one in row})

    @cached_property
    def schedule(self) -> Schedule:
        """The order of the actions, without their times."""
        return Schedule(tuple(tuple(one.action for one in actions) for actions in self.ranks))


def build_schedule(
    graph: SegmentGraph,
    num_microbatches: int,
    pipeline: Pipeline,
    active_microbatches: int,
    costs: CostModel = CostModel(),  # noqa: B008 - frozen
    *,
    thorough: bool = True,
    task_budget: int | None = None,
) -> Timeline:
    """Plans the order in which every rank executes a mini-batch.

    ``simple``: a rank starts its backward passes when all its forward passes have ended; all
    microbatches are in flight then, whatever ``active_microbatches`` says. ``interleaved``: a
    backward pass that can run is preferred, and no rank has more than ``active_microbatches``
    begun and not finished. Backward-first can still leave ranks downstream idle, so several orders
    within that bound are simulated and the fastest is taken, the first of equals. ``zero_bubble``:
    the same for a graph whose backward passes are two halves; the gradients of weights go where a
    rank would be idle, and a microbatch is finished on a rank when it has them. There
    ``active_microbatches`` bounds what a rank keeps: where it has several segments, more
    microbatches may have begun, each with its share. There a search that is not ``thorough`` is
    several times as fast, and finds orders that are slower by a few hundredths.

    Args:
        graph: what is ordered.
        num_microbatches: of the mini-batch.
        pipeline: which kind of order.
        active_microbatches: how many may be in flight.
        costs: what the machine adds.
        thorough: see above.
        task_budget: passes that may be simulated in all, but for those of the first few policies;
            None takes as many as are worth it for a mini-batch that is planned once.

    Returns:
        The order with its simulated times, as ``simulate`` gives them.

    Raises:
        ScheduleError: an argument is out of range.

    Source: model-parallel-core-features.md, Pipeline Execution Schedule
    """
    if num_microbatches < 1 or active_microbatches < 1:
        raise ScheduleError(
            f"A pipeline needs at least one microbatch, and one active microbatch; received "
            f"microbatches {num_microbatches} and active_microbatches {active_microbatches}: "
            f"use 1 or more."
        )
    if pipeline == "simple":
        policies = simple_policies()
    elif pipeline == "interleaved":
        policies = interleaved_policies(min(active_microbatches, num_microbatches))
    elif pipeline == "zero_bubble":
        policies = zero_bubble_policies(
            graph, min(active_microbatches, num_microbatches), thorough=thorough
        )
    else:
        raise ScheduleError(
            f"pipeline is 'simple', 'interleaved' or 'zero_bubble'; received {pipeline!r}: use one "
            "of these."
        )
    passes = PassGraph(graph, costs)
    num_tasks = max(1, len(passes.passes) * num_microbatches)
    best: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    best_makespan = float("inf")
    shortest = passes.shortest_time(num_microbatches)
    usual = _HALVES_BUDGET if pipeline == "zero_bubble" else _TASK_BUDGET
    budget = usual if task_budget is None else task_budget
    for policy in policies[: max(_MIN_POLICIES, budget // num_tasks)]:
        orders = list_schedule(passes, num_microbatches, policy, limit=best_makespan)
        if orders is None:
            continue  # it takes as long
        makespan = max(_end_times(passes, num_microbatches, orders), default=0.0)
        # Rounding must not decide between orders that are equally fast.
        if makespan < best_makespan * (1 - _ROUNDING):
            best, best_makespan = orders, makespan
        if best_makespan * (1 - _ROUNDING) <= shortest:
            break  # no other one is faster
    return _timeline(graph, passes, best, _end_times(passes, num_microbatches, best))


def simulate(
    graph: SegmentGraph,
    schedule: Schedule,
    num_microbatches: int,
    costs: CostModel = CostModel(),  # noqa: B008 - frozen
) -> Timeline:
    """Replays a given order; every action starts as soon as its rank and its inputs allow.

    Raises:
        ScheduleError: the schedule does not hold every action of the graph once, on its rank.
        ScheduleDeadlock: ranks wait for each other; says where each one is stuck.
    """
    passes = PassGraph(graph, costs)
    orders = _orders(graph, passes, schedule, num_microbatches)
    return _timeline(graph, passes, orders, _end_times(passes, num_microbatches, orders))


def _orders(
    graph: SegmentGraph, passes: PassGraph, schedule: Schedule, num_microbatches: int
) -> list[list[int]]:
    """The tasks of a schedule, checked to be those of the graph."""
    if len(schedule.ranks) != graph.num_ranks:
        raise ScheduleError(
            f"A schedule has one order a rank; received {len(schedule.ranks)} orders for "
            f"{graph.num_ranks} ranks: give an empty one to a rank without segments."
        )
    tasks = {
        Action(kind, segment, microbatch): microbatch * len(passes.passes) + node
        for microbatch in range(num_microbatches)
        for node, (kind, segment) in enumerate(passes.passes)
    }
    orders: list[list[int]] = []
    for rank, actions in enumerate(schedule.ranks):
        orders.append([])
        for action in actions:
            task = tasks.pop(action, None)
            if task is None or passes.ranks[task % len(passes.passes)] != rank:
                raise ScheduleError(
                    f"A schedule holds every action of its graph once, on the rank of its segment; "
                    f"received {action} on rank {rank}, which is unknown, repeated, or another "
                    f"rank's: remove it."
                )
            orders[-1].append(task)
    if tasks:
        missing = " ".join(str(action) for action in list(tasks)[:8])
        raise ScheduleError(
            f"A schedule holds every action of its graph; received one without {len(tasks)} of "
            f"them ({missing}{' ...' if len(tasks) > 8 else ''}): add them."
        )
    return orders


def _end_times(
    passes: PassGraph, num_microbatches: int, orders: Sequence[Sequence[int]]
) -> list[float]:
    """When every task ends if each rank keeps to its order."""
    num_nodes = len(passes.passes)
    ends: list[float | None] = [None] * (num_nodes * num_microbatches)
    clocks = [0.0] * passes.num_ranks
    positions = [0] * passes.num_ranks
    sleepers: dict[int, list[int]] = defaultdict(list)
    runnable = list(range(passes.num_ranks))
    while runnable:
        rank = runnable.pop()
        while positions[rank] < len(orders[rank]):
            task = orders[rank][positions[rank]]
            node = task % num_nodes
            start = clocks[rank]
            blocker = None
            for earlier, delay in passes.predecessors[node]:
                end = ends[task - node + earlier]
                if end is None:
                    blocker = task - node + earlier
                    break
                start = max(start, end + delay)
            if blocker is not None:
                sleepers[blocker].append(rank)
                break
            ends[task] = clocks[rank] = start + passes.durations[node]
            positions[rank] += 1
            runnable += sleepers.pop(task, ())
    if sleepers:
        raise ScheduleDeadlock(_deadlock_report(passes, orders, positions, ends))
    return [end for end in ends if end is not None]


def _deadlock_report(
    passes: PassGraph,
    orders: Sequence[Sequence[int]],
    positions: Sequence[int],
    ends: Sequence[float | None],
) -> str:
    num_nodes = len(passes.passes)
    lines = []
    for rank, (order, position) in enumerate(zip(orders, positions, strict=True)):
        if position == len(order):
            lines.append(f"  rank {rank} has ended")
            continue
        task = order[position]
        node = task % num_nodes
        waits = [
            f"{_action(passes, task - node + earlier)} on rank {passes.ranks[earlier]}"
            for earlier, _ in passes.predecessors[node]
            if ends[task - node + earlier] is None
        ]
        lines.append(
            f"  rank {rank} is stuck at {_action(passes, task)}: waits for {', '.join(waits)}"
        )
    return (
        "The order of actions lets every rank go on; received one in which ranks wait for each "
        "other. Move what is waited for to an earlier place:\n" + "\n".join(lines)
    )


def _action(passes: PassGraph, task: int) -> Action:
    microbatch, node = divmod(task, len(passes.passes))
    return Action(*passes.passes[node], microbatch)


def _timeline(
    graph: SegmentGraph,
    passes: PassGraph,
    orders: Sequence[Sequence[int]],
    ends: Sequence[float],
) -> Timeline:
    ranks = tuple(
        tuple(
            TimedAction(
                _action(passes, task),
                ends[task] - passes.durations[task % len(passes.passes)],
                ends[task],
            )
            for task in order
        )
        for order in orders
    )
    return Timeline(
        ranks,
        tuple(segment.activation_bytes for segment in graph.segments),
        graph.kept,
        graph=graph,
    )


def _transfers(graph: SegmentGraph, actions: set[Action]) -> tuple[Transfer, ...]:
    """Returns what crosses ranks: values after forward passes, and their gradients."""
    sizes: defaultdict[tuple[Action, Action], int] = defaultdict(int)
    microbatches = {one.microbatch for one in actions}
    for edge in graph.edges:
        source, target = graph.segments[edge.source], graph.segments[edge.target]
        if source.rank == target.rank:
            continue
        for microbatch in microbatches:
            ways = [(Kind.FORWARD, source, Kind.FORWARD, target)]
            if edge.has_grad:
                ways += [(target.gradient_kind, target, source.gradient_kind, source)]
            for made, maker, read, reader in ways:
                pair = Action(made, maker.index, microbatch), Action(read, reader.index, microbatch)
                if actions.issuperset(pair):
                    sizes[pair] += edge.num_bytes
    return tuple(Transfer(*pair, size) for pair, size in sizes.items())
