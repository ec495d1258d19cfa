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

import functools
import heapq
import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from smdistributed.modelparallel.common.planning.schedule import Kind, SegmentGraph

#: Sums of shares are not exact.
_ROUNDING = 1e-9


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
        kept: of every node, the share of its segment in what its rank keeps of a microbatch.
        is_forward: of every node.
        is_last: of every node, whether nobody waits for it: it makes gradients of weights.
        completes: of every node, whether its segment keeps nothing of the microbatch after it.
        nodes: of every rank.
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
        self.kept = [graph.kept[segment] for _, segment in self.passes]
        self.is_forward = [kind is Kind.FORWARD for kind, _ in self.passes]
        self.is_last = [kind is Kind.WEIGHT_GRADIENTS for kind, _ in self.passes]
        self.completes = [kind.completes for kind, _ in self.passes]
        self.nodes: list[list[int]] = [[] for _ in range(graph.num_ranks)]
        for node, rank in enumerate(self.ranks):
            self.nodes[rank].append(node)
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

    @functools.cached_property
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

    def shortest_time(self, num_microbatches: int) -> float:
        """What no order takes less than: every rank has work to do, and some before and after."""
        soonest = [math.inf] * self.num_ranks
        for rank, start in zip(self.ranks, self.earliest_starts, strict=True):
            soonest[rank] = min(soonest[rank], start)
        return max(
            (
                begin + num_microbatches * load + end
                for begin, load, end in zip(soonest, self.loads, self.rests, strict=True)
                if begin < math.inf
            ),
            default=0.0,
        )

    @functools.cached_property
    def rests(self) -> list[float]:
        """What at least comes after the last pass of every rank; endless where it has none."""
        left = [0.0] * len(self.passes)
        rests = [math.inf] * self.num_ranks
        for node in reversed(range(len(self.passes))):
            for later, delay in self.successors[node]:
                left[node] = max(left[node], delay + self.durations[later] + left[later])
            rests[self.ranks[node]] = min(rests[self.ranks[node]], left[node])
        return rests

    @functools.cached_property
    def loads(self) -> list[float]:
        """The time that one microbatch takes of every rank."""
        loads = [0.0] * self.num_ranks
        for rank, duration in zip(self.ranks, self.durations, strict=True):
            loads[rank] += duration
        return loads

    @functools.cached_property
    def first_and_last(self) -> list[tuple[int, int]]:
        """The first and the last node of every segment that has a backward pass."""
        number = {one: node for node, one in enumerate(self.passes)}
        return [
            (number[Kind.FORWARD, segment], node)
            for node, (kind, segment) in enumerate(self.passes)
            if kind.completes
        ]

    @functools.cached_property
    def needed(self) -> tuple[list[float], list[int | None]]:
        """What forward passes wait for where a rank has so much room, by node.

        Returns:
            How much room is needed: what the pass and those after it on its rank keep. And the one
            before it on its rank. So there is always room for the oldest microbatch: what would be
            in its way began after it in a later segment, or left room for it.
        """
        needed = [0.0] * len(self.passes)
        before: list[int | None] = [None] * len(self.passes)
        later: list[float] = [0.0] * self.num_ranks
        after: list[int | None] = [None] * self.num_ranks
        for node in reversed(range(len(self.passes))):
            if self.is_forward[node]:
                rank = self.ranks[node]
                later[rank] += self.kept[node]
                needed[node] = later[rank]
                if (following := after[rank]) is not None:
                    before[following] = node
                after[rank] = node
        return needed, before

    @functools.cached_property
    def begins_and_ends(self) -> list[tuple[int, list[int]]]:
        """For every rank with a backward pass: its first node, and the last nodes of segments."""
        found: dict[int, tuple[int, list[int]]] = {}
        for first, last in self.first_and_last:
            begin, ends = found.setdefault(self.ranks[first], (first, []))
            found[self.ranks[first]] = min(begin, first), [*ends, last]
        return list(found.values())


#: Which of a forward and a backward pass that both can run goes first.
Preference = Literal["backward", "forward", "alternate"]


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
        room: what a rank may keep, in activations of whole microbatches: of a rank with two
            segments, as in a V, one of them takes its share alone. At least 1; None for no bound.
        prefers: which class goes first; "alternate": the one that did not run last.
        oldest_first: within a class, the oldest microbatch goes before the best segment.
        shuffle: where it is a number, each pass has a preference drawn by this number, instead of
            those above; gradients of weights still go last.
    """

    deepest_first: bool = True
    max_in_flight: int | None = None
    slack: float | None = None
    fill_first: bool = False
    forwards_first: bool = False
    rank_by_rank: bool = False
    room: float | None = None
    prefers: Preference = "backward"
    oldest_first: bool = False
    shuffle: int | None = None

    @property
    def waits_at_home(self) -> bool:
        """Whether a pass is held back by others of its rank alone.

        They come before it in the order, so a pipeline that keeps to the order takes as long.
        """
        return self.max_in_flight is None or self.rank_by_rank


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


def zero_bubble_policies(
    graph: SegmentGraph, active_microbatches: int, *, thorough: bool
) -> list[Policy]:
    """Policies for backward passes in two halves, the most promising ones first.

    The gradients of weights wait until their rank would be idle, or until what they keep is needed
    for another microbatch. A rank downstream may put off more of them, so each has a bound of its
    own. A bound of memory lets more microbatches begin where a rank has several segments; one
    of whole microbatches gives tidier orders where memory is short. Of two that are equally fast
    the one that keeps less is first.

    Args:
        graph: what is ordered.
        active_microbatches: the bound.
        thorough: whether seconds are worth an order that is faster by a few hundredths.
    """
    ranks = [segment.rank for segment in graph.segments if segment.has_backward]
    # What a rank of one segment keeps are whole microbatches.
    visits_again = len(set(ranks)) < len(ranks)
    return list(_for_halves(active_microbatches, thorough and visits_again))


#: By how much less a rank may keep than what is allowed, in microbatches.
_ROOMS = (0, 0.25, 0.5, 0.75)
# Of a hundred orders by chance one is often nearer to the best than all that follow a rule: where
# rules took 280 ms, and passes of the busiest rank 259, a few dozen came to 267.
_SHUFFLES = 24
#: How much a microbatch that is a later one is held back, in preferences of passes.
_AGING = (0.0, 0.1, 0.3, 1.0, 3.0)
# Of 48 preferences those that together came nearest to the best of all, on chains and in Vs of 2
# to 8 ranks with 4 to 16 microbatches.
_WITH_ROOM = (
    Policy(False, prefers="alternate", oldest_first=True),
    Policy(True, slack=1.0),
    Policy(True, oldest_first=True),
    Policy(False, slack=1.5, prefers="alternate"),
    Policy(True, prefers="forward"),
    Policy(False, prefers="forward", oldest_first=True),
    Policy(True, slack=1.5, oldest_first=True),
    Policy(True, prefers="alternate", oldest_first=True),
)


@functools.cache
def _for_halves(active_microbatches: int, has_rooms: bool) -> tuple[Policy, ...]:
    """Returns the policies for backward passes in two halves: a search asks for them many times.

    Args:
        active_microbatches: the bound.
        has_rooms: whether some leave room that they are allowed.
    """
    found = [
        Policy(deepest, bound, slack, rank_by_rank=True)
        for slack in (None, 1.5, 1.25, 1.0)
        for bound in range(max(1, active_microbatches - 1), active_microbatches + 1)
        for deepest in (True, False)
    ]
    found += [replace(policy, room=active_microbatches) for policy in _WITH_ROOM]
    if has_rooms:
        rooms = [max(1, active_microbatches - step) for step in _ROOMS]
        shuffled = [Policy(shuffle=number) for number in range(_SHUFFLES)]
        found += [replace(policy, room=room) for policy in _WITH_ROOM for room in rooms[1:]]
        found += [replace(policy, room=room) for policy in shuffled for room in rooms]
    return tuple(found)


def list_schedule(
    graph: PassGraph, num_microbatches: int, policy: Policy, limit: float = math.inf
) -> list[list[int]] | None:
    """Runs the pipeline under a policy and returns every rank's tasks in order.

    Every wait is for an older microbatch or for a pass earlier in the same one, so that some rank
    can always go on.

    Args:
        graph: of the passes.
        num_microbatches: how many there are.
        policy: what a free rank prefers.
        limit: None is returned for an order that takes so long, as soon as that is certain: when a
            rank has been idle for too long for what it has left, and what comes after that.
    """
    return _Run(graph, num_microbatches, policy, limit).run()


class _Run:
    """The state of one event-driven simulation.

    A segment takes its microbatches in order, so what can run of a node are the microbatches from
    the first that has not begun up to the first that waits.
    """

    def __init__(
        self, graph: PassGraph, num_microbatches: int, policy: Policy, limit: float
    ) -> None:
        self.limit = limit if policy.waits_at_home else math.inf
        #: When a rank must begin its next pass to be in time.
        self.latest = [
            self.limit - num_microbatches * load - rest
            for load, rest in zip(graph.loads, graph.rests, strict=True)
        ]
        self.is_late = False
        self.graph = graph
        self.policy = policy
        self.num_nodes = len(graph.passes)
        self.num_microbatches = num_microbatches
        # (node, delay, lag): a pass of microbatch m releases the node's of microbatch m + lag.
        self.followers = [[(node, delay, 0) for node, delay in after] for after in graph.successors]
        self.waiting = [len(waits) for waits in graph.predecessors] * num_microbatches
        for earlier, later, lag in _memory_bounds(graph, policy):
            self.followers[earlier].append((later, 0.0, lag))
            for task in range(lag * self.num_nodes + later, len(self.waiting), self.num_nodes):
                self.waiting[task] += 1
        self.is_forward, self.is_last = graph.is_forward, graph.is_last
        self.completes, self.nodes = graph.completes, graph.nodes
        self.has_turns = policy.room is not None or policy.rank_by_rank
        self.forwards_left = [0] * graph.num_ranks
        if policy.forwards_first:
            for rank, is_forward in zip(graph.ranks, self.is_forward, strict=True):
                self.forwards_left[rank] += num_microbatches if is_forward else 0
        self.needed, self.before = graph.needed
        self.aging, self.preferences = 0.0, [0.0] * self.num_nodes
        if policy.shuffle is not None:
            chance = random.Random(policy.shuffle)  # the same on all ranks
            self.aging = _AGING[policy.shuffle % len(_AGING)]
            self.preferences = [
                3 * chance.random() + float(is_forward and chance.random() < 1 / 3)
                for is_forward in self.is_forward
            ]
        self.kept = [0.0] * graph.num_ranks
        self.was_forward = [False] * graph.num_ranks
        self.arrivals = [0.0] * len(self.waiting)
        self.begun = [0] * self.num_nodes
        self.ready = [0] * self.num_nodes
        self.busy = [False] * graph.num_ranks
        self.orders: list[list[int]] = [[] for _ in range(graph.num_ranks)]
        # (time, serial, task): the end of a task, or ~task when its last input arrives.
        self.events: list[tuple[float, int, int]] = []
        self.serial = 0

    def run(self) -> list[list[int]] | None:
        for task, count in enumerate(self.waiting):
            if not count:
                self._make_ready(task)
        now, changed = 0.0, set(range(self.graph.num_ranks))
        while True:
            for rank in sorted(changed):
                self._start_next(rank, now)
            if self.is_late:
                return None
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
        node = task % self.num_nodes
        self.ready[node] += 1
        return self.graph.ranks[node]

    def _start_next(self, rank: int, now: float) -> None:
        if self.busy[rank]:
            return
        begun, ready = self.begun, self.ready
        can_run = [
            node
            for node in self.nodes[rank]
            if begun[node] < ready[node] and self._may_begin(rank, node)
        ]
        if not can_run:
            return
        (node, *others) = can_run
        if others:
            forward_class = self._forward_class(rank)
            node = min(can_run, key=lambda node: self._key(node, forward_class))
        task = begun[node] * self.num_nodes + node
        begun[node] += 1
        self.is_late |= now >= self.latest[rank]
        self.latest[rank] += self.graph.durations[node]
        if self.is_forward[node]:
            self.forwards_left[rank] -= 1
            self.kept[rank] += self.graph.kept[node]
        if not self.is_last[node]:
            self.was_forward[rank] = self.is_forward[node]
        self.busy[rank] = True
        self.orders[rank].append(task)
        self._push_event(now + self.graph.durations[node], task)

    def _may_begin(self, rank: int, node: int) -> bool:
        if not self.is_forward[node]:
            return self.forwards_left[rank] <= 0
        room, before = self.policy.room, self.before[node]
        if self.has_turns and before is not None and self.begun[node] == self.begun[before]:
            return False  # in turn, or what is left for it would be another's
        return room is None or self.kept[rank] + self.needed[node] <= room + _ROUNDING

    def _forward_class(self, rank: int) -> int:
        """The class of a forward pass on a rank; that of a backward pass is 1."""
        alternate = self.policy.prefers == "alternate" and not self.was_forward[rank]
        first = self.policy.forwards_first or self.policy.prefers == "forward" or alternate
        return 0 if first else 2

    def _key(self, node: int, forward_class: int) -> tuple[float, ...]:
        """The priority of the next task of a node; the smallest goes first."""
        policy, microbatch = self.policy, self.begun[node]
        if policy.shuffle is not None:
            return self.is_last[node], self.preferences[node] + self.aging * microbatch
        fill = (policy.max_in_flight or 0) if policy.fill_first else 0
        if self.is_last[node]:
            group = 3  # nobody waits for it: it goes where the rank would be idle
        elif self.is_forward[node]:
            group = 0 if microbatch < fill else forward_class
        else:
            group = 1
        place = -node if policy.deepest_first else node
        return (group, microbatch, place) if policy.oldest_first else (group, place, microbatch)

    def _end(self, task: int, now: float, changed: set[int]) -> None:
        microbatch, node = divmod(task, self.num_nodes)
        rank = self.graph.ranks[node]
        self.busy[rank] = False
        if self.completes[node]:
            self.kept[rank] -= self.graph.kept[node]
        changed.add(rank)
        for follower, delay, lag in self.followers[node]:
            if microbatch + lag >= self.num_microbatches:
                continue
            later = (microbatch + lag) * self.num_nodes + follower
            if now + delay > self.arrivals[later]:
                self.arrivals[later] = now + delay
            self.waiting[later] -= 1
            if self.waiting[later]:
                continue
            if self.arrivals[later] > now:
                self._push_event(self.arrivals[later], ~later)
            else:
                changed.add(self._make_ready(later))

    def _push_event(self, time: float, what: int) -> None:
        heapq.heappush(self.events, (time, self.serial, what))
        self.serial += 1


def _memory_bounds(graph: PassGraph, policy: Policy) -> list[tuple[int, int, int]]:
    """Waits (earlier, later, lag): microbatch m + lag at ``later`` is after m at ``earlier``."""
    bounds: list[tuple[int, int, int]] = []
    if policy.max_in_flight is not None and policy.rank_by_rank:
        for starting, ending in graph.begins_and_ends:
            bounds += [(end, starting, policy.max_in_flight) for end in ending]
    elif policy.max_in_flight is not None:
        starts_of_all = [node for node, waits in enumerate(graph.predecessors) if not waits]
        ends_of_all = [node for node, after in enumerate(graph.successors) if not after]
        bounds += [(e, s, policy.max_in_flight) for e in ends_of_all for s in starts_of_all]
    if policy.slack is not None:
        starts = graph.earliest_starts
        period = max(graph.loads)
        for first, last in graph.first_and_last:
            held = starts[last] + graph.durations[last] - starts[first]
            # How many microbatches are held at once when one enters every period.
            needed = math.ceil(policy.slack * held / period - 1e-9) if period else 1
            bounds.append((last, first, max(1, needed)))
    return bounds
