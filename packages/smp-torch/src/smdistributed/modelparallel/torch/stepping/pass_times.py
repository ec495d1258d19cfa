"""Timing the passes of a mini-batch while it is trained on, and ordering what follows by that.

Counted costs, and operations timed one by one, say less of a pass than the pass itself: what its
kernels find in caches, how fast the device runs under load, what the host does in between. What
microbatches are computed, and what from, stays; only the order of passes may change, and with it
the order in which gradients are added up. GPUs tell what passes took without being waited for, so
there it is the default without replicas, unless PyTorch is asked for the same bits in each run.

Source: smd_model_parallel_pytorch.rst, DistributedModel (trace_execution_times).
"""

from __future__ import annotations

import collections
import statistics
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.planning.choosing import WORTH
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.planning.common_schedule import (
    common_schedule,
    timeline_of,
)
from smdistributed.modelparallel.torch.planning.other_settings import faster_settings
from smdistributed.modelparallel.torch.planning.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.common_order import say_prediction, say_settings
from smdistributed.modelparallel.torch.stepping.preparing import Preparation, Prepared

#: The mini-batch of a kind whose passes are timed: before it, modules and functions are compiled,
#: kernels chosen, and graphs of passes captured.
_TIMED = 4
#: Mini-batches that train, at most, until each rank has one of such a kind at the same time: where
#: none has come, no order would last.
_LAST = 64

#: Segment, kind -> seconds.
_Seconds = dict[tuple[int, Kind], float]


class PassTimes:
    """Has the mini-batches of one step function ordered by the times of passes, once.

    Args:
        runtime: the state of the library in this process.
        preparation: makes the orders.
    """

    def __init__(self, runtime: TorchRuntime, preparation: Preparation) -> None:
        self._runtime = runtime
        self._preparation = preparation
        self._ran: weakref.WeakKeyDictionary[Prepared, int] = weakref.WeakKeyDictionary()
        self._num_calls = 0
        self._is_done = False

    def note(self, prepared: Prepared, marks: Sequence[Any]) -> None:
        """Counts a mini-batch that trains; times its passes, if it is the one to be timed.

        Replicas have one order, since modules may exchange something between them. Their batches
        may differ in kind, but all count the same calls: by these they know when to ask each other.
        Collective: WORLD, from the first call that may be timed to the one that is.

        Args:
            prepared: what ran.
            marks: of its executor.
        """
        if self._is_done or not prepared.differentiated:
            return
        models = models_of(self._runtime)
        if not (self._is_usual or any(each.tracing.trace_execution_times for each in models)):
            self._is_done = True
            return
        if any(model.data_parallel.is_joining for model in models):
            return  # some replicas have no batches, and do not come here
        self._num_calls += 1
        self._ran[prepared] = self._ran.get(prepared, 0) + 1
        if self._num_calls < _TIMED:
            return
        is_ready = self._ran[prepared] >= _TIMED
        plan, num_microbatches = prepared.plans[0], len(prepared.plans)
        shape = [(each.rank, each.index in plan.backward) for each in plan.segments]
        is_one = len(set(prepared.plans)) == 1 and not plan.in_turn
        own = self._own(prepared, marks) if is_one and is_ready else {}
        told = (is_ready, is_one, shape, own)
        everyones = self._runtime.communicator.allgather(told, CommGroup.WORLD)
        self._is_done = all(each[0] for each in everyones) or self._num_calls == _LAST
        if any(each[:3] != (True, True, shape) for each in everyones):
            return
        seconds = _slowest([each[3] for each in everyones])
        for segment in plan.segments:
            segment.seconds = _costs(segment, seconds)
        self._order(prepared, plan, num_microbatches)

    @property
    def _is_usual(self) -> bool:
        """Whether passes are timed though no model asks for it.

        Replicas would have to ask each other, and a script may have them call other step functions.
        """
        runtime = self._runtime
        return (
            runtime.device.type == "cuda"
            and runtime.topology.rdp_cp_size == 1
            and not torch.are_deterministic_algorithms_enabled()
        )

    def _own(self, prepared: Prepared, marks: Sequence[Any]) -> _Seconds:
        found = collections.defaultdict(list)
        for each in prepared.executor.timed(marks):
            found[each.action.segment, each.action.kind].append(each.end - each.start)
        return {key: statistics.median(times) for key, times in found.items()}

    def _order(self, prepared: Prepared, plan: Plan, num_microbatches: int) -> None:
        """Orders by the times, if that gains; tells what they predict."""
        config, num_ranks = self._runtime.config, self._runtime.topology.pp_size
        order, active = self._runtime.order, config.active_microbatches
        now = timeline_of(prepared.plans, num_ranks, prepared.schedule)
        better = common_schedule(prepared.plans, num_ranks, order, active)
        if better.makespan < WORTH * now.makespan:
            self._preparation.again()  # which tells how long a step is predicted to take
            seconds, bubble_fraction = better.makespan, better.bubble_fraction
        else:
            seconds, bubble_fraction = now.makespan, now.bubble_fraction
            say_prediction(self._runtime, num_microbatches, seconds)
        if self._runtime.rank == 0:
            found = faster_settings(plan, num_ranks, num_microbatches, order, active, seconds)
            say_settings(found, bubble_fraction)


def _slowest(everyones: Sequence[_Seconds]) -> _Seconds:
    """Returns what a pass took where it took longest: replicas wait for each other."""
    found: _Seconds = {}
    for each in everyones:
        for key, seconds in each.items():
            found[key] = max(seconds, found.get(key, 0.0))
    return found


def _costs(segment: SegmentNodes, seconds: Mapping[tuple[int, Kind], float]) -> PassCosts:
    """Returns the costs of a segment, from what its passes took."""

    def of(kind: Kind) -> float:
        return seconds.get((segment.index, kind), 0.0)

    weights = of(Kind.WEIGHT_GRADIENTS)
    if whole := of(Kind.BACKWARD):
        counted = segment.costs
        weights = whole * counted.weights / counted.backward if counted.backward else 0.0
        return PassCosts(of(Kind.FORWARD), whole, weights)
    return PassCosts(of(Kind.FORWARD), of(Kind.INPUT_GRADIENTS) + weights, weights)
