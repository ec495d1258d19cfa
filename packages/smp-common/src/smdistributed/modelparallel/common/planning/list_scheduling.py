"""Greedy list scheduling of the passes of a pipeline.

A rank that is free takes the best pass that can run; a *policy* says which is best, and holds
passes back to bound memory. All microbatches are alike and every policy prefers the older one
between two passes of one kind and segment, so each segment takes its microbatches in order. A
memory bound is then no more than another dependency: with at most two microbatches in flight,
microbatch 5 starts when microbatch 3 has ended.

Large plans have 10**5 passes, so the work is on integers: a pass (kind, segment) is a *node*, and
node ``n`` for microbatch ``m`` is the *task* ``m * num_nodes + n``.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from smdistributed.modelparallel.common.planning.schedule import Kind, SegmentGraph


@dataclass(frozen=True)
class CostModel:
    """What the machine adds to the costs of the segments, in their unit of time.

    Attributes:
        latency: of every transfer between two ranks.
        seconds_per_byte: of every transfer between two ranks.
        action_overhead: added to the duration of every action.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0
    action_overhead: float = 0.0

    @classmethod
    def unmeasured(cls, graph: SegmentGraph) -> CostModel:
        """Returns a latency of a tenth of a mean pass, for plans whose costs nobody measured.

        Of orders that are equally fast if transfers take no time, most are slower on any machine;
        and costs that are guesses, a few percent off, must not seem to hide what transfers take.
        """
        passes = [graph.segments[segment].cost(kind) for kind, segment in graph.predecessors]
        return cls(latency=sum(passes) / len(passes) / 10 if passes else 0.0)


class PassGraph:
    """A segment graph flattened to integers.

    Attributes:
        num_ranks: number of pipeline ranks.
        passes: (kind, segment) of every node, in an order in which one microbatch could run alone.
        ranks: pipeline rank of every node.
        durations: of every node.
        predecessors: for every node, (node, delay) of what it waits for.
        successors: for every node, (node, delay) of what waits for it.
    """

    def __init__(self, graph: SegmentGraph, costs: CostModel) -> None:
        self.num_ranks = graph.num_ranks
        self.passes = tuple(graph.predecessors)
        number = {one: node for node, one in enumerate(self.passes)}
        segments = [graph.segments[segment] for _, segment in self.passes]
        self.ranks = [segment.rank for segment in segments]
        self.durations = [
            costs.action_overhead + segment.cost(kind)
            for (kind, _), segment in zip(self.passes, segments, strict=True)
        ]
        num_bytes: dict[tuple[Kind, int, int], int] = {}
        for edge in graph.edges:
            forward = (Kind.FORWARD, edge.source, edge.target)
            num_bytes[forward] = num_bytes.get(forward, 0) + edge.num_bytes
            if edge.has_grad:
                kind = graph.segments[edge.target].gradient_kind
                backward = (kind, edge.target, edge.source)
                num_bytes[backward] = num_bytes.get(backward, 0) + edge.num_bytes
        self.predecessors: list[list[tuple[int, float]]] = []
        self.successors: list[list[tuple[int, float]]] = [[] for _ in self.passes]
        for node, (_, segment) in enumerate(self.passes):
            waits = []
            for kind, source in graph.predecessors[self.passes[node]]:
                delay = 0.0
                if graph.segments[source].rank != graph.segments[segment].rank:
                    sent = num_bytes.get((kind, source, segment), 0)
                    delay = costs.latency + sent * costs.seconds_per_byte
                waits.append((number[kind, source], delay))
                self.successors[number[kind, source]].append((node, delay))
            self.predecessors.append(waits)

    def earliest_starts(self) -> list[float]:
        """When every node starts if one microbatch runs alone."""
        starts: list[float] = []
        for waits in self.predecessors:
            starts.append(
                max(
                    (starts[node] + self.durations[node] + delay for node, delay in waits),
                    default=0,
                )
            )
        return starts

    def loads(self) -> list[float]:
        """The time that one microbatch takes of every rank."""
        loads = [0.0] * self.num_ranks
        for rank, duration in zip(self.ranks, self.durations, strict=True):
            loads[rank] += duration
        return loads

    def first_and_last(self) -> list[tuple[int, int]]:
        """The first and the last node of every segment that has a backward pass."""
        number = {one: node for node, one in enumerate(self.passes)}
        return [
            (number[Kind.FORWARD, segment], node)
            for node, (kind, segment) in enumerate(self.passes)
            if kind.completes
        ]

    def begins_and_ends(self) -> list[tuple[int, list[int]]]:
        """For every rank with a backward pass: its first node, and the last nodes of segments."""
        found: dict[int, tuple[int, list[int]]] = {}
        for first, last in self.first_and_last():
            begin, ends = found.setdefault(self.ranks[first], (first, []))
            found[self.ranks[first]] = min(begin, first), [*ends, last]
        return list(found.values())


@dataclass(frozen=True)
class Policy:
    """What a free rank prefers, and what it holds back to bound memory.

    Attributes:
        deepest_first: between passes of one class, prefer the one furthest on in its microbatch;
            otherwise the one least far on, which gives the other ranks work.
        max_in_flight: microbatches started and not finished, or None for no bound.
        slack: holds forward passes of a segment back when more microbatches wait there for their
            backward pass than a steady pipeline needs, times this factor; None does not.
        fill_first: while the first ``max_in_flight`` microbatches enter, forward passes go before
            backward passes, so that the ranks downstream start early.
        forwards_first: no backward pass on a rank before all its forward passes.
        rank_by_rank: ``max_in_flight`` counts what has begun and not ended on each rank, whatever
            the others have; otherwise what has not ended on all of them.
    """

    deepest_first: bool = True
    max_in_flight: int | None = None
    slack: float | None = None
    fill_first: bool = False
    forwards_first: bool = False
    rank_by_rank: bool = False


def simple_policies() -> list[Policy]:
    """Policies of the documented pipeline ``simple``."""
    return [Policy(deepest_first=deepest, forwards_first=True) for deepest in (True, False)]


def interleaved_policies(active_microbatches: int) -> list[Policy]:
    """Policies of the documented pipeline ``interleaved``, the most promising ones first.

    All of them prefer a backward pass that can run. Where segments are one chain over the ranks,
    the first (which is 1F1B) is best, at the least memory. Where a rank is visited again, being
    greedy makes ranks downstream wait, and it depends on the costs which of the others is best.
    """
    bounds = [active_microbatches]
    if active_microbatches > 1:
        bounds.append(active_microbatches - 1)
    policies = [Policy(max_in_flight=active_microbatches, slack=1.0)]
    policies += [
        Policy(deepest, bound, slack, fill)
        for bound in bounds
        for deepest in (True, False)
        for slack, fill in (
            (1.5, True),
            (1.5, False),
            (None, False),
            (1.25, True),
            (2.0, True),
            (None, True),
        )
    ]
    return policies


def zero_bubble_policies(active_microbatches: int) -> list[Policy]:
    """Policies for backward passes in two halves, the most promising ones first.

    The gradients of weights wait until their rank would be idle, or until what they keep is needed
    for another microbatch. A rank downstream may put off more of them, so each has a bound of its
    own. Of two that are equally fast the one that keeps less is first.
    """
    return [
        Policy(deepest, bound, slack, rank_by_rank=True)
        for slack in (None, 1.5, 1.25, 1.0)
        for bound in range(max(1, active_microbatches - 1), active_microbatches + 1)
        for deepest in (True, False)
    ]


def list_schedule(graph: PassGraph, num_microbatches: int, policy: Policy) -> list[list[int]]:
    """Runs the pipeline under a policy and returns every rank's tasks in order.

    Every wait is for an older microbatch or for a pass earlier in the same one, so that some rank
    can always go on.
    """
    return _Run(graph, num_microbatches, policy).run()


class _Run:
    """The state of one event-driven simulation."""

    def __init__(self, graph: PassGraph, num_microbatches: int, policy: Policy) -> None:
        self.graph = graph
        self.num_nodes = len(graph.passes)
        self.num_microbatches = num_microbatches
        self.keys = _keys(graph, num_microbatches, policy)
        # (node, delay, lag): a pass of microbatch m releases the node's of microbatch m + lag.
        self.followers = [[(node, delay, 0) for node, delay in after] for after in graph.successors]
        self.waiting = [len(waits) for waits in graph.predecessors] * num_microbatches
        for earlier, later, lag in _memory_bounds(graph, policy):
            self.followers[earlier].append((later, 0.0, lag))
            for task in range(lag * self.num_nodes + later, len(self.waiting), self.num_nodes):
                self.waiting[task] += 1
        self.forwards_left = [0] * graph.num_ranks
        if policy.forwards_first:
            for rank, (kind, _) in zip(graph.ranks, graph.passes, strict=True):
                self.forwards_left[rank] += 0 if kind.is_backward else num_microbatches
        self.arrivals = [0.0] * len(self.waiting)
        self.ready: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_ranks)]
        self.busy = [False] * graph.num_ranks
        self.orders: list[list[int]] = [[] for _ in range(graph.num_ranks)]
        # (time, serial, task): the end of a task, or ~task when its last input arrives.
        self.events: list[tuple[float, int, int]] = []
        self.serial = 0

    def run(self) -> list[list[int]]:
        for task, count in enumerate(self.waiting):
            if not count:
                self._make_ready(task)
        now, changed = 0.0, set(range(self.graph.num_ranks))
        while True:
            for rank in sorted(changed):
                self._start_next(rank, now)
            if not self.events:
                break
            # All that happens at one time comes before any choice made at that time.
            now, changed = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, _, task = heapq.heappop(self.events)
                if task < 0:
                    changed.add(self._make_ready(~task))
                else:
                    self._end(task, now, changed)
        assert sum(map(len, self.orders)) == len(self.waiting), "a policy deadlocks"
        return self.orders

    def _make_ready(self, task: int) -> int:
        rank = self.graph.ranks[task % self.num_nodes]
        heapq.heappush(self.ready[rank], (self.keys[task], task))
        return rank

    def _start_next(self, rank: int, now: float) -> None:
        ready = self.ready[rank]
        if self.busy[rank] or not ready:
            return
        task = ready[0][1]
        node = task % self.num_nodes
        if self.forwards_left[rank]:
            if self.graph.passes[node][0].is_backward:
                return
            self.forwards_left[rank] -= 1
        heapq.heappop(ready)
        self.busy[rank] = True
        self.orders[rank].append(task)
        self._push_event(now + self.graph.durations[node], task)

    def _end(self, task: int, now: float, changed: set[int]) -> None:
        microbatch, node = divmod(task, self.num_nodes)
        rank = self.graph.ranks[node]
        self.busy[rank] = False
        changed.add(rank)
        for follower, delay, lag in self.followers[node]:
            if microbatch + lag >= self.num_microbatches:
                continue
            later = (microbatch + lag) * self.num_nodes + follower
            self.arrivals[later] = max(self.arrivals[later], now + delay)
            self.waiting[later] -= 1
            if not self.waiting[later]:
                if self.arrivals[later] > now:
                    self._push_event(self.arrivals[later], ~later)
                else:
                    changed.add(self._make_ready(later))

    def _push_event(self, time: float, what: int) -> None:
        heapq.heappush(self.events, (time, self.serial, what))
        self.serial += 1


def _keys(graph: PassGraph, num_microbatches: int, policy: Policy) -> list[int]:
    """The priority of every task; the smallest goes first."""
    num_nodes = len(graph.passes)
    fill = (policy.max_in_flight or 0) if policy.fill_first else 0
    keys = []
    for microbatch in range(num_microbatches):
        for node, (kind, _) in enumerate(graph.passes):
            if kind is Kind.WEIGHT_GRADIENTS:
                group = 3  # nobody waits for it: it goes where the rank would be idle
            elif kind.is_backward:
                group = 1
            else:
                group = 0 if policy.forwards_first or microbatch < fill else 2
            place = num_nodes - 1 - node if policy.deepest_first else node
            keys.append((group * num_nodes + place) * num_microbatches + microbatch)
    return keys


def _memory_bounds(graph: PassGraph, policy: Policy) -> list[tuple[int, int, int]]:
    """Waits (earlier, later, lag): microbatch m + lag at ``later`` is after m at ``earlier``."""
    bounds: list[tuple[int, int, int]] = []
    if policy.max_in_flight is not None and policy.rank_by_rank:
        for starting, ending in graph.begins_and_ends():
            bounds += [(end, starting, policy.max_in_flight) for end in ending]
    elif policy.max_in_flight is not None:
        starts_of_all = [node for node, waits in enumerate(graph.predecessors) if not waits]
        ends_of_all = [node for node, after in enumerate(graph.successors) if not after]
        bounds += [(e, s, policy.max_in_flight) for e in ends_of_all for s in starts_of_all]
    if policy.slack is not None:
        starts = graph.earliest_starts()
        period = max(graph.loads())
        for first, last in graph.first_and_last():
            held = starts[last] + graph.durations[last] - starts[first]
            # How many microbatches are held at once when one enters every period.
            needed = math.ceil(policy.slack * held / period - 1e-9) if period else 1
            bounds.append((last, first, max(1, needed)))
    return bounds
