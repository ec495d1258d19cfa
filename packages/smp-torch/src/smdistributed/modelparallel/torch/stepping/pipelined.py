"""A step with several partitions: record, then replay the schedule.

What a call does, on every rank of a pipeline:

1. Rank 0 of the pipeline says what it was called with, and which recordings fit; the others take
   its word.
2. Where no recording fits a microbatch, one is made: the models are partitioned if they are not
   yet, the body runs on fake tensors, the graph is cut, and the ranks compare their plans.
3. The inputs that a rank computes with are sent to it, and the executor runs the schedule.
4. Returned tensors go to all ranks; gradients are reduced.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.common.planning.report import partition_text
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.planning.simulator import TimedAction, Timeline
from smdistributed.modelparallel.torch.execute.executor import Executor, prepare
from smdistributed.modelparallel.torch.execute.links import Links
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.plan.common_schedule import common_schedule
from smdistributed.modelparallel.torch.plan.final_gradients import (
    final_gradients,
)
from smdistributed.modelparallel.torch.plan.placement import Placement, decide
from smdistributed.modelparallel.torch.plan.segments import Plan
from smdistributed.modelparallel.torch.random.keys import draw_step_seed
from smdistributed.modelparallel.torch.record.capture import profile
from smdistributed.modelparallel.torch.record.costs import Profile
from smdistributed.modelparallel.torch.record.decisions import GivenDecisions, OwnDecisions
from smdistributed.modelparallel.torch.record.ir import Value
from smdistributed.modelparallel.torch.record.nested import fill, tensors_in
from smdistributed.modelparallel.torch.record.recorder import Recorder
from smdistributed.modelparallel.torch.record.replicated import evaluate_replicated
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime, data_plane_timeout
from smdistributed.modelparallel.torch.stepping.first_rank import Heard, say
from smdistributed.modelparallel.torch.stepping.inputs import Call, Header, StepInputs
from smdistributed.modelparallel.torch.stepping.recordings import Recording, Recordings
from smdistributed.modelparallel.torch.stepping.results import combine

logger = logging.getLogger(__name__)

#: Prepared mini-batches kept; each is a combination of plans, one a microbatch.
_MOST_PREPARED = 32


@dataclass(frozen=True)
class Prepared:
    """A mini-batch whose microbatches go certain ways, ready to run.

    Attributes:
        plans: one a microbatch.
        executor: runs this rank's part.
        needed_inputs: for each pp_rank, the positions of the tensor arguments that it reads.
        modules: those that are called or whose parameters are read.
        differentiated: those of them that a gradient may reach.
        final_gradients: for each backward pass of this rank, the parameters that it completes.
    """

    plans: tuple[Plan, ...]
    executor: Executor
    needed_inputs: list[set[int]]
    modules: set[nn.Module]
    differentiated: set[nn.Module]
    final_gradients: list[frozenset[nn.Parameter]]


class PipelinedStep:
    """Runs a step function with several partitions.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        rules: which arguments are split.
        detach_outputs: must be True: results come from other processes, without their graphs.
    """

    is_tracing = True  # the body itself runs for nothing else

    def __init__(
        self,
        runtime: TorchRuntime,
        function: Callable[..., Any],
        rules: SplitRules,
        detach_outputs: bool,
    ) -> None:
        if not detach_outputs:
            raise UnsupportedError(
                "detach_outputs=False needs pipeline_parallel_degree 1: with more partitions the "
                "returned tensors come from other processes, without their graphs."
            )
        self.runtime = runtime
        self._function = function
        topology, rank = runtime.topology, runtime.rank
        self._pp_rank = runtime.coordinates.pp_rank
        if runtime.links is None:
            runtime.links = Links(
                topology.groups(CommGroup.PP_GROUP),
                topology.members(CommGroup.PP_GROUP, rank),
                self._pp_rank,
                runtime.process_groups,
                runtime.device,
                data_plane_timeout(runtime.config.communication_timeout),
            )
        self._links: Links = runtime.links
        self._inputs = StepInputs(runtime, self._links, rules)
        self._recordings = Recordings(runtime, function, self._recording)
        self._prepared: OrderedDict[tuple[Plan, ...], Prepared] = OrderedDict()
        self._programs: dict[Plan, dict[int, Program]] = {}
        self._ran: tuple[Executor, list[tuple[float, float]]] | None = None
        self._recorder: Recorder | None = None
        self._reached: dict[DistributedModel, None] = {}

    # ------------------------------------------------------------------ a call

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one mini-batch; see ``StepFunction``."""
        inputs = self._inputs
        for model in self.runtime.live_models():
            model.refresh()
        kind = inputs.kind(args, kwargs)
        calls: Sequence[Call] = ()
        weights: Sequence[float] = ()
        seed = draw_step_seed()

        def make() -> Header:
            nonlocal calls, weights
            calls, weights = inputs.split(args, kwargs)
            own = inputs.own(kind, calls)
            return Header(kind, seed, own, self._recordings.choose(kind, own, calls))

        header = inputs.agree(kind, make)
        if self._pp_rank != 0:
            calls, weights = inputs.split(*inputs.stand_ins(header.kind, args, kwargs))
        if None in header.choices:
            self._place_models(calls[0])
        try:
            recordings = self._recordings.find(header, calls)
        finally:
            self.runtime.random.end()
        prepared = self._prepare(tuple(recording.plan for recording in recordings))
        if self._pp_rank != 0:
            given = inputs.exchange(header.kind, args, kwargs, prepared.needed_inputs)
            calls, weights = inputs.split(*given)
        else:
            inputs.exchange(header.kind, args, kwargs, prepared.needed_inputs)
        tensors = [tensors_in(call) for call in calls]
        reached = list(dict.fromkeys(each for one in recordings for each in one.reached))
        results = self._execute(prepared, tensors, weights, header.seed, _scale(reached))
        filled = self._distribute(recordings, tensors, results)
        for model in self._models_of(prepared.differentiated):
            model.data_parallel.end_step()
            model.run_post_step_hooks()
        return combine(filled, detach=True)

    @contextlib.contextmanager
    def _recording(
        self,
    ) -> Iterator[tuple[Callable[[Recorder], None], dict[DistributedModel, None]]]:
        """Marks the runtime as being inside this step while the body runs on fakes."""
        self._reached = {}
        self.runtime.current_step = self

        def note(recorder: Recorder) -> None:
            self._recorder = recorder

        try:
            yield note, self._reached
        finally:
            self.runtime.current_step = None
            self._recorder = None

    def backward(self, model: DistributedModel, tensors: Any, grad_tensors: Any) -> None:
        """Notes a ``model.backward`` while the body is recorded."""
        self._reached[model] = None
        if self._recorder is not None:
            self._recorder.backward(tensors, grad_tensors)

    def timeline(self) -> Timeline:
        """See ``StepFunction.timeline``."""
        if self._ran is None:
            raise SMPError("the step function has not run yet.")
        executor, times = self._ran
        timed = executor.timed(times)
        ranks = self.runtime.communicator.allgather(timed, CommGroup.PP_GROUP)
        start = min(one.start for actions in ranks for one in actions)
        return Timeline(
            tuple(
                tuple(
                    TimedAction(one.action, one.start - start, one.end - start) for one in actions
                )
                for actions in ranks
            )
        )

    # ------------------------------------------------------------------ preparing

    def _prepare(self, plans: tuple[Plan, ...]) -> Prepared:
        """Schedules a combination of plans. Every rank finds the same by itself."""
        known = self._prepared.get(plans)
        if known is not None:
            self._prepared.move_to_end(plans)
            return known
        runtime = self.runtime
        pp_size = runtime.topology.pp_size
        config = runtime.config
        schedule = common_schedule(plans, pp_size, config.pipeline, config.active_microbatches)
        itinerary = prepare(plans, schedule, self._pp_rank)
        self._links.connect(itinerary.directions | _usual_directions(pp_size))
        executor = Executor(
            plans,
            [self._programs_of(plan) for plan in plans],
            itinerary,
            self._links,
            runtime.device,
        )
        needed = [
            {position for plan in set(plans) for position in plan.inputs_of_rank(rank)}
            for rank in range(pp_size)
        ]
        every = {index for plan in plans for index in range(len(plan.segments))}
        self._prepared[plans] = prepared = Prepared(
            plans,
            executor,
            needed,
            {module for plan in set(plans) for module in plan.modules(every)},
            {module for plan in set(plans) for module in plan.modules(plan.backward)},
            final_gradients(plans, itinerary.actions),
        )
        if len(self._prepared) > _MOST_PREPARED:
            self._prepared.popitem(last=False)
            alive = {plan for each in self._prepared.values() for plan in each.plans}
            self._programs = {
                plan: programs for plan, programs in self._programs.items() if plan in alive
            }
        return prepared

    def _models_of(self, modules: set[nn.Module]) -> list[DistributedModel]:
        """Returns the models that modules belong to; the same on every rank."""
        return [
            model
            for model in self.runtime.live_models()
            if not modules.isdisjoint(model.holder.fakes.names)
        ]

    def _programs_of(self, plan: Plan) -> dict[int, Program]:
        if plan not in self._programs:
            self._programs[plan] = {
                segment.index: Program(
                    plan, segment, self.runtime.device, self.runtime.random.drawing
                )
                for segment in plan.segments
                if segment.rank == self._pp_rank
            }
        return self._programs[plan]

    def _place_models(self, call: Call) -> None:
        """Partitions the models that have no partition yet and are called. Collective: PP_GROUP."""
        runtime = self.runtime
        models = runtime.live_models()
        if all(model.partitioned for model in models):
            return
        config = runtime.config
        communicator = runtime.communicator

        def measure(decisions: OwnDecisions | GivenDecisions) -> Profile:
            with self._recording():
                return profile(
                    [model.holder.fakes for model in models],
                    self._function,
                    *call,
                    runtime.fake_mode,
                    runtime.device,
                    decisions,
                    runtime.random,
                )

        if self._pp_rank == 0:
            own = OwnDecisions()
            measured: list[Profile] = []

            def answer() -> Sequence[Any]:
                measured.append(measure(own))
                return own.answers

            say(communicator, answer)
            costs = measured[0]
        else:
            heard = Heard(communicator)
            try:
                costs = measure(GivenDecisions(heard))
            finally:
                heard()  # also when nobody asked
        for module, each in costs.modules.items():
            if each.opaque:
                logger.info("%s is kept whole: %s", type(module).__name__, each.opaque)
        for model in models:
            if model.get_module() not in costs.modules:
                continue
            model.drawing.take(costs)
            if model.partitioned:
                continue
            pinned = runtime.manual_partitions.of(model.get_module())
            if not config.auto_partition:
                pinned.setdefault(model.get_module(), config.default_partition)
            pinned = model.holder.fixed_partition or pinned
            placement = decide(
                model.holder.fakes,
                None if config.skip_tracing else costs,
                pinned,
                runtime.topology.pp_size,
                config.memory_weight,
            )
            # One decision for the whole job: code that goes through a set has no order of its own.
            assignment = communicator.from_first(placement.assignment, CommGroup.WORLD)
            placement = Placement(model.holder.fakes, assignment)
            model.place(placement)
            if self._pp_rank == 0 and runtime.coordinates.dp_rank == 0:
                logger.info("%s", partition_text(placement.assignment))

    # ------------------------------------------------------------------ execution

    def _execute(
        self,
        prepared: Prepared,
        inputs: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[float],
        seed: int,
        scale: str,
    ) -> list[dict[int, torch.Tensor]]:
        models = self._models_of(prepared.modules)
        for model in models:
            model.data_parallel.begin_step()
        random = self.runtime.random
        random.begin(seed)

        final = iter(prepared.final_gradients)
        # Between two passes Python's code is out of the caches: what need not run costs most.
        reduced = [model.data_parallel for model in models if model.data_parallel.reduces]

        def enter_pass(kind: Kind, microbatch: int) -> None:
            random.enter_pass(microbatch, backward=kind is Kind.BACKWARD)
            completes = next(final) if kind is Kind.BACKWARD else frozenset()
            for each in reduced:
                each.enter_pass(completes)

        scales = list(weights) if scale == "mean" else [1.0] * len(weights)
        try:
            results, times = prepared.executor.run(inputs, scales, enter_pass)
        finally:
            if not random.end():
                # A module drew that was not known to: it is found in the next step.
                for model in models:
                    model.drawing.learn()
        self._ran = prepared.executor, times
        return results

    def _distribute(
        self,
        recordings: Sequence[Recording],
        inputs: Sequence[Sequence[torch.Tensor]],
        results: Sequence[dict[int, torch.Tensor]],
    ) -> list[Any]:
        """Gives every rank the returned tensors of all. Collective: PP_GROUP."""
        found: list[dict[int, torch.Tensor]] = [dict(each) for each in results]
        batches: dict[tuple[object, ...], list[tuple[int, Value]]] = {}
        for m, recording in enumerate(recordings):
            plan = recording.plan
            for value in plan.graph.returned:
                if value.replicated:
                    found[m][value.index] = evaluate_replicated(
                        lambda tensor: tensor, (value,), {}, inputs[m]
                    )
                    continue
                owner = plan.segments[value.node.segment].rank
                alike = (owner, value.shape, value.dtype, value.order)
                batches.setdefault(alike, []).append((m, value))
        for members in batches.values():
            m, value = members[0]
            owner = recordings[m].plan.segments[value.node.segment].rank
            self._share(owner, [value for _, value in members], [found[m] for m, _ in members])
        for recording, values in zip(recordings, found, strict=True):
            numbers = recording.plan.graph.numbers
            for number, value in zip(recording.capture.pending, numbers, strict=True):
                number.settle(values[value.index].item())
        return [
            _filled(recording, values) for recording, values in zip(recordings, found, strict=True)
        ]

    def _share(
        self, owner: int, values: Sequence[Value], found: Sequence[dict[int, torch.Tensor]]
    ) -> None:
        """Broadcasts tensors of one shape, one a microbatch, in one message."""
        if owner == self._pp_rank:
            batch = torch.stack(
                [value.wire(each[value.index]) for each, value in zip(found, values, strict=True)]
            )
        else:
            first = values[0].wire_buffer(self.runtime.device)
            batch = first.new_empty((len(values), *first.shape))
        self._links.broadcast(batch, owner)
        for each, value, tensor in zip(found, values, batch.unbind(), strict=True):
            each[value.index] = value.from_wire(tensor)


def _scale(reached: Sequence[DistributedModel]) -> str:
    """Returns how the gradients of microbatches combine."""
    scales = {model.data_parallel.gradient_scale for model in reached}
    if len(scales) > 1:
        raise UnsupportedError(
            "models with different average_grads_across_microbatches were differentiated in one "
            "step function; give them the same value."
        )
    return scales.pop() if scales else "mean"


def _usual_directions(pp_size: int) -> set[tuple[int, int]]:
    """Returns the pairs of pp_ranks that nearly every step uses: inputs, neighbours, tied ends."""
    pairs = {(0, rank) for rank in range(1, pp_size)}
    pairs |= {(rank, rank + 1) for rank in range(pp_size - 1)}
    pairs |= {(0, pp_size - 1)}
    return pairs | {(target, source) for source, target in pairs}


def _filled(recording: Recording, values: Mapping[int, torch.Tensor]) -> Any:
    return fill(recording.capture.graph.result, Value, lambda value: values[value.index])
