"""From the plans of a mini-batch's microbatches to what runs it, kept for the next such one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from smdistributed.modelparallel.common.planning.schedule import Schedule
from smdistributed.modelparallel.torch.execute.compiled_runs import CompiledRuns
from smdistributed.modelparallel.torch.execute.executor import Executor
from smdistributed.modelparallel.torch.execute.itinerary import prepare
from smdistributed.modelparallel.torch.execute.passes import Passes
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.execute.split_programs import SplitPlan
from smdistributed.modelparallel.torch.planning.final_gradients import final_gradients
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.ir import any_draws
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.common_order import CommonOrder, schedule_of
from smdistributed.modelparallel.torch.tensor_parallel.backward_passes import PassesAlone

#: Plans, how each is computed with pieces, the number of a schedule.
_Key = tuple[tuple[Plan, ...], tuple[SplitPlan, ...], int]
#: Prepared mini-batches kept; each is a combination of plans, one a microbatch.
_MOST_PREPARED = 32


@dataclass(frozen=True, eq=False)
class Prepared:
    """A mini-batch whose microbatches go certain ways, ready to run.

    Attributes:
        plans: one a microbatch.
        schedule: the order of what all ranks compute.
        passes: what this rank computes.
        executor: has it done in order.
        needed_inputs: for each pp_rank, the positions of the tensor arguments that it reads.
        modules: those that are called or whose parameters are read.
        differentiated: those of them that a gradient may reach.
        final_gradients: for each backward pass of this rank, the parameters that it completes.
        draws: whether some rank draws random numbers; None: that is known when they have run.
    """

    plans: tuple[Plan, ...]
    schedule: Schedule
    passes: Passes
    executor: Executor
    needed_inputs: list[set[int]]
    modules: set[nn.Module]
    differentiated: set[nn.Module]
    final_gradients: list[frozenset[nn.Parameter]]
    draws: bool | None


class Preparation:
    """Prepares mini-batches of one step function, each combination of plans once.

    Args:
        runtime: the state of the library in this process.
        compiled: compiles what lies between modules; None: it runs as it is.
    """

    def __init__(self, runtime: TorchRuntime, compiled: CompiledRuns | None) -> None:
        self._runtime = runtime
        self._compiled = compiled
        self._pp_rank = runtime.coordinates.pp_rank
        self._order = CommonOrder(runtime)
        self._known: OrderedDict[_Key, Prepared] = OrderedDict()
        self._programs: dict[Plan, dict[int, Program]] = {}

    def of(self, plans: tuple[Plan, ...], splits: tuple[SplitPlan, ...] = ()) -> Prepared:
        """Returns what runs a combination of plans. The ranks of a pipeline find the same.

        Collective: TP_GROUP and CP_GROUP; in the first call, on GPUs, WORLD, which makes the
        communicators.

        Args:
            plans: one a microbatch.
            splits: how each is computed with pieces of sequences; empty: it is not.
        """
        number, schedule = self._order.of(plans)
        key = plans, splits, number
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        schedule = schedule or schedule_of(self._runtime, plans)
        self._known[key] = prepared = self._prepare(plans, splits, schedule)
        if len(self._known) > _MOST_PREPARED:
            self._known.popitem(last=False)
            alive = {plan for each in self._known.values() for plan in each.plans}
            self._programs = {
                plan: programs for plan, programs in self._programs.items() if plan in alive
            }
        return prepared

    def again(self) -> None:
        """Orders every mini-batch anew when it comes: passes were timed. Every rank must call."""
        self._order.forget()
        self._known.clear()

    def let_go(self) -> None:
        """Forgets everything; every rank must, before the same call."""
        self.again()
        self._programs.clear()

    def _prepare(
        self, plans: tuple[Plan, ...], splits: tuple[SplitPlan, ...], schedule: Schedule
    ) -> Prepared:
        runtime = self._runtime
        pp_size = runtime.topology.pp_size
        itinerary = prepare(plans, schedule, self._pp_rank)
        runtime.links.connect(_usual_directions(pp_size), itinerary.rooms)
        passes = Passes(
            plans,
            [each.programs for each in splits] or [self._programs_of(plan) for plan in plans],
            itinerary,
            runtime.device,
            runtime.tensor_group.passes or PassesAlone(),
            frees_cuts=runtime.config.offload_activations,
            splits=splits,
        )
        every = {index for plan in plans for index in range(len(plan.segments))}
        return Prepared(
            plans,
            schedule,
            passes,
            Executor(itinerary, runtime.links, runtime.device),
            [
                {position for plan in set(plans) for position in plan.inputs_of_rank(rank)}
                for rank in range(pp_size)
            ],
            {module for plan in set(plans) for module in plan.modules(every)},
            {module for plan in set(plans) for module in plan.modules(plan.backward)},
            final_gradients(plans, itinerary.actions),
            any_draws(node.draws for plan in set(plans) for node in plan.graph.nodes),
        )

    def _programs_of(self, plan: Plan) -> dict[int, Program]:
        if plan not in self._programs:
            runtime = self._runtime
            self._programs[plan] = {
                segment.index: Program(
                    plan, segment, runtime.device, runtime.random, self._compiled
                )
                for segment in plan.segments
                if segment.rank == self._pp_rank
            }
        return self._programs[plan]


def _usual_directions(pp_size: int) -> set[tuple[int, int]]:
    """Returns the pairs of pp_ranks that nearly every step uses: inputs, neighbours, tied ends."""
    pairs = {(0, rank) for rank in range(1, pp_size)}
    pairs |= {(rank, rank + 1) for rank in range(pp_size - 1)}
    pairs |= {(0, pp_size - 1)}
    return pairs | {(target, source) for source, target in pairs}
