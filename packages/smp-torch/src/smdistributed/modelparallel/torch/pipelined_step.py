"""A step with several partitions: record once, then replay the schedule.

What a call does, on every rank of a pipeline:

1. Rank 0 of the pipeline says what it was called with (shapes, types, Python arguments); the
   others take its word, and the inputs that they need, from it.
2. A call that is new in these respects is recorded: the models are partitioned if they are not
   yet, the body runs on fake tensors, the graph is cut, scheduled and compiled, and the ranks
   compare their plans.
3. The executor runs the schedule; returned tensors go to all ranks; gradients are reduced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.microbatch import SplitRules, split_arguments
from smdistributed.modelparallel.common.planning.report import partition_text
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.planning.simulator import (
    TimedAction,
    Timeline,
    build_schedule,
)
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.pipeline.capture import capture, profile
from smdistributed.modelparallel.torch.pipeline.executor import Executor, prepare
from smdistributed.modelparallel.torch.pipeline.ir import Value
from smdistributed.modelparallel.torch.pipeline.links import Links
from smdistributed.modelparallel.torch.pipeline.program import Program
from smdistributed.modelparallel.torch.pipeline.recorder import Recorder
from smdistributed.modelparallel.torch.pipeline.replicated import evaluate_replicated
from smdistributed.modelparallel.torch.pipeline.segments import Plan, cut
from smdistributed.modelparallel.torch.pipeline.structure import fill, map_tensors, tensors_in
from smdistributed.modelparallel.torch.placement import decide
from smdistributed.modelparallel.torch.random_streams import draw_step_seed
from smdistributed.modelparallel.torch.runtime import TorchRuntime, data_plane_timeout
from smdistributed.modelparallel.torch.step_results import combine
from smdistributed.modelparallel.torch.tensors import TENSORS

logger = logging.getLogger(__name__)

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class TensorKind:
    """What a recording depends on of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorKind:
        """Returns the kind of a tensor."""
        return TensorKind(
            tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad
        )


@dataclass(frozen=True)
class Header:
    """What rank 0 of the pipeline tells the others at the start of a call.

    Attributes:
        tensors: the kinds of its tensor arguments, in order.
        constants: its plain Python arguments.
        state: training flags, grad mode and the like, on which the recorded code may depend.
        seed: of the random numbers of this step.
    """

    tensors: tuple[TensorKind, ...]
    constants: tuple[object, ...]
    state: tuple[object, ...]
    seed: int

    @property
    def key(self) -> tuple[object, ...]:
        """What decides which recording fits."""
        return self.tensors, self.constants, self.state


@dataclass
class Recording:
    """Everything that a call of one kind needs.

    Attributes:
        plans: one a microbatch.
        executor: runs this rank's.
        needed_inputs: for each pp_rank, the positions of the tensor arguments that it reads.
        models: those that the step calls.
        scale: how the gradients of microbatches combine, "mean" or "sum".
    """

    plans: list[Plan]
    executor: Executor
    needed_inputs: list[set[int]]
    models: list[DistributedModel]
    scale: str


class PipelinedStep:
    """Runs a step function with several partitions.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        rules: which arguments are split.
        detach_outputs: must be True: results come from other processes, without their graphs.
    """

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
        self._rules = rules
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._last: tuple[Recording, list[TimedAction]] | None = None
        self._reached: dict[DistributedModel, None] = {}
        self._recorder: Recorder | None = None
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

    # ------------------------------------------------------------------ a call

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one mini-batch; see ``StepFunction``."""
        runtime = self.runtime
        tensors = tensors_in((args, kwargs))
        header = self._agree(tensors, args, kwargs)
        recording = self._recordings.get(header.key)
        everything = set(range(len(tensors)))
        needed = [everything] * runtime.topology.pp_size
        if recording is not None:
            needed = recording.needed_inputs
        calls, weights = self._split(args, kwargs, self._exchange(tensors, header, needed))
        if recording is None:
            recording = self._record(calls)
            self._recordings[header.key] = recording
        inputs = [tensors_in(call) for call in calls]
        self._check_guards(recording, inputs)
        results, timed = self._execute(recording, inputs, weights, header.seed)
        self._last = (recording, timed)
        filled = self._distribute(recording, inputs, results)
        for model in recording.models:
            if recording.plans[0].backward:
                model.reduce_gradients()
        return combine(filled, detach=True)

    def backward(self, model: DistributedModel, tensors: Any, grad_tensors: Any) -> None:
        """Notes a ``model.backward`` while the body is recorded."""
        self._reached[model] = None
        if self._recorder is not None:
            self._recorder.backward(tensors, grad_tensors)

    def timeline(self) -> Timeline:
        """See ``StepFunction.timeline``."""
        if self._last is None:
            raise SMPError("the step function has not run yet.")
        _, timed = self._last
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

    # ------------------------------------------------------------------ arguments

    def _agree(
        self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Header:
        """Returns what rank 0 of the pipeline was called with. Collective: PP_GROUP."""
        own = Header(
            tuple(TensorKind.of(tensor) for tensor in tensors),
            tuple(_constants((args, kwargs))),
            self._state(),
            draw_step_seed(),
        )
        header: Header = self.runtime.communicator.from_first(own, CommGroup.PP_GROUP)
        if len(header.tensors) != len(tensors):
            raise SMPError(
                f"rank {self.runtime.rank}: the step function was called with {len(tensors)} "
                f"tensors here and with {len(header.tensors)} on the first rank of the pipeline; "
                "every rank must pass the same structure (empty tensors of the right batch size "
                "will do)."
            )
        if header.state != own.state:
            raise SMPError(
                f"rank {self.runtime.rank}: training flags, requires_grad or grad mode differ from "
                "those on the first rank of the pipeline; call model.train(), model.eval() and "
                "the like on every rank."
            )
        return header

    def _state(self) -> tuple[object, ...]:
        device = self.runtime.device.type
        models = self.runtime.live_models()
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            tuple(module.training for model in models for module in model.fakes.names),
            tuple(parameter.requires_grad for model in models for parameter in model.parameters()),
        )

    def _exchange(
        self, tensors: list[torch.Tensor], header: Header, needed: Sequence[set[int]]
    ) -> list[torch.Tensor]:
        """Returns rank 0's tensors: real where this rank needs them, else without data."""
        if self._pp_rank == 0:
            transfers = [
                self._links.send(tensors[position], target)
                for target in range(1, len(needed))
                for position in sorted(needed[target])
            ]
            for transfer in transfers:
                transfer.wait()
            return tensors
        received = []
        for position, kind in enumerate(header.tensors):
            if position in needed[self._pp_rank]:
                on_host = kind.device_type == "cpu"
                device = torch.device("cpu") if on_host else self.runtime.device
                buffer = torch.empty(kind.shape, dtype=kind.dtype, device=device)
                tensor = self._links.receive(buffer, 0).wait()
            else:
                tensor = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
            received.append(tensor.requires_grad_(kind.requires_grad))
        return received

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Call], Sequence[float]]:
        replacements = iter(tensors)
        args, kwargs = map_tensors((args, kwargs), lambda tensor: next(replacements))
        return split_arguments(TENSORS, self._rules, self.runtime.config.microbatches, args, kwargs)

    # ------------------------------------------------------------------ recording

    def _record(self, calls: Sequence[Call]) -> Recording:
        """Partitions the models if need be and plans this kind of call. Collective: PP_GROUP."""
        runtime = self.runtime
        pp_size = runtime.topology.pp_size
        self._place_models(calls[0])
        models = [model for model in runtime.live_models() if model.partitioned]
        kinds: dict[tuple[TensorKind, ...], Plan] = {}
        plans = []
        for call in calls:
            kind = tuple(TensorKind.of(tensor) for tensor in tensors_in(call))
            if kind not in kinds:
                kinds[kind] = self._plan(models, call)
            plans.append(kinds[kind])
        self._compare(plans)
        graph = plans[0].segment_graph(pp_size)
        for plan in plans[1:]:
            if plan.shape() != plans[0].shape():
                raise UnsupportedError(
                    "microbatches of different sizes take different ways through the model; use a "
                    "number of microbatches that divides the batch."
                )
        config = runtime.config
        schedule = build_schedule(
            graph, len(calls), config.pipeline, config.active_microbatches
        ).schedule
        itinerary = prepare(plans, schedule, self._pp_rank)
        self._links.connect(itinerary.directions | _usual_directions(pp_size))
        programs = {
            plan: {
                segment.index: Program(plan, segment, runtime.device)
                for segment in plan.segments
                if segment.rank == self._pp_rank
            }
            for plan in kinds.values()
        }
        executor = Executor(
            plans, [programs[plan] for plan in plans], itinerary, self._links, runtime.device
        )
        needed = [plans[0].inputs_of_rank(rank) for rank in range(pp_size)]
        return Recording(plans, executor, needed, models, self._scale())

    def _place_models(self, call: Call) -> None:
        runtime = self.runtime
        models = runtime.live_models()
        if all(model.partitioned for model in models):
            return
        config = runtime.config
        with self._stepping():
            costs = profile(
                [model.fakes for model in models],
                self._function,
                *call,
                runtime.fake_mode,
                runtime.device,
            )
        for model in models:
            if model.partitioned or model.get_module() not in costs.modules:
                continue
            pinned = runtime.manual_partitions.of(model.get_module())
            if not config.auto_partition:
                pinned.setdefault(model.get_module(), config.default_partition)
            pinned = model.fixed_partition or pinned
            placement = decide(
                model.fakes,
                None if config.skip_tracing else costs,
                pinned,
                runtime.topology.pp_size,
                config.memory_weight,
            )
            model.measure(costs)
            model.place(placement)
            if self._pp_rank == 0 and runtime.coordinates.dp_rank == 0:
                logger.info("%s", partition_text(placement.assignment))

    def _plan(self, models: Sequence[DistributedModel], call: Call) -> Plan:
        runtime = self.runtime
        leaves = {
            module: name for model in models for module, name in model.placement.leaves.items()
        }
        partition_of = {
            module: partition
            for model in models
            for module, partition in model.placement.partition_of.items()
        }

        def owner_of(slot: Any) -> int:
            for model in models:
                if slot in model.fakes.slots:
                    return model.placement.owner_of(slot)
            raise AssertionError("a recorded parameter belongs to no model")

        with self._stepping():
            graph = capture(
                [model.fakes for model in models],
                self._function,
                *call,
                runtime.fake_mode,
                runtime.device,
                leaves,
                on_start=self._note_recorder,
            )
        return cut(graph, partition_of, owner_of)

    def _note_recorder(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def _stepping(self) -> _Stepping:
        return _Stepping(self)

    def _compare(self, plans: Sequence[Plan]) -> None:
        """Raises on every rank if the ranks recorded different steps. Collective: PP_GROUP."""
        communicator = self.runtime.communicator
        digests = communicator.allgather([plan.digest() for plan in plans], CommGroup.PP_GROUP)
        if all(digest == digests[0] for digest in digests):
            return
        lines = communicator.allgather(
            [line for plan in plans for line in plan.lines()], CommGroup.PP_GROUP
        )
        ranks = self.runtime.topology.members(CommGroup.PP_GROUP, self.runtime.rank)
        for rank, others in zip(ranks[1:], lines[1:], strict=True):
            for mine, theirs in zip([*lines[0], "the end"], [*others, "the end"], strict=False):
                if mine != theirs:
                    raise SMPError(
                        f"ranks {ranks[0]} and {rank} run different code in the step function; "
                        f"first difference: rank {ranks[0]}: {mine}; rank {rank}: {theirs}."
                    )

    def _scale(self) -> str:
        scales = {model.gradient_scale for model in self._reached}
        if len(scales) > 1:
            raise UnsupportedError(
                "models with different average_grads_across_microbatches were differentiated in "
                "one step function; give them the same value."
            )
        return scales.pop() if scales else "mean"

    # ------------------------------------------------------------------ execution

    def _check_guards(self, recording: Recording, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
        for microbatch, (plan, tensors) in enumerate(zip(recording.plans, inputs, strict=True)):
            for guard in plan.graph.guards:
                found = evaluate_replicated(guard.function, guard.args, guard.kwargs, tensors)
                if found != guard.expected:
                    raise UnsupportedError(
                        f"a decision that the step took from its inputs ({guard.name} gave "
                        f"{guard.expected!r} when it was recorded) came out as {found!r} for "
                        f"microbatch {microbatch}. Make the decision before the step and pass it "
                        "in as a Python argument."
                    )

    def _execute(
        self,
        recording: Recording,
        inputs: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[float],
        seed: int,
    ) -> tuple[list[dict[int, torch.Tensor]], list[TimedAction]]:
        streams = [
            model.random_streams for model in recording.models if model.random_streams is not None
        ]
        for model in recording.models:
            model.sync_buffers()
        for stream in streams:
            stream.begin_step(seed)

        def enter_pass(kind: Kind, microbatch: int) -> None:
            for stream in streams:
                stream.enter_pass(microbatch, backward=kind is Kind.BACKWARD)

        scales = list(weights) if recording.scale == "mean" else [1.0] * len(weights)
        try:
            return recording.executor.run(inputs, scales, enter_pass)
        finally:
            for stream in streams:
                stream.end_step()

    def _distribute(
        self,
        recording: Recording,
        inputs: Sequence[Sequence[torch.Tensor]],
        results: Sequence[dict[int, torch.Tensor]],
    ) -> list[Any]:
        """Gives every rank the returned tensors of all. Collective: PP_GROUP."""
        plans = recording.plans
        found: list[dict[int, torch.Tensor]] = [dict(each) for each in results]
        for position, value in enumerate(plans[0].graph.returned):
            values = [plan.graph.returned[position] for plan in plans]
            if value.replicated:
                for m, each in enumerate(values):
                    found[m][each.index] = evaluate_replicated(
                        lambda tensor: tensor, (each,), {}, inputs[m]
                    )
                continue
            owner = plans[0].segments[value.node.segment].rank
            if len({each.shape for each in values}) == 1:
                self._share(owner, values, found)
            else:
                for m, each in enumerate(values):
                    self._share(owner, [each], [found[m]])
        return [_filled(plan, values) for plan, values in zip(plans, found, strict=True)]

    def _share(
        self, owner: int, values: Sequence[Value], found: Sequence[dict[int, torch.Tensor]]
    ) -> None:
        """Broadcasts tensors of one shape, one a microbatch, in one message."""
        first = values[0]
        if owner == self._pp_rank:
            batch = torch.stack(
                [each[value.index] for each, value in zip(found, values, strict=True)]
            )
        else:
            batch = torch.empty(
                (len(values), *first.shape), dtype=first.dtype, device=self.runtime.device
            )
        self._links.broadcast(batch, owner)
        for each, value, tensor in zip(found, values, batch.unbind(), strict=True):
            each[value.index] = tensor


class _Stepping:
    """Marks the runtime as being inside a step while the body runs on fakes."""

    def __init__(self, step: PipelinedStep) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._step.runtime.current_step = self._step

    def __exit__(self, *exception: object) -> None:
        self._step.runtime.current_step = None
        self._step._recorder = None


def _usual_directions(pp_size: int) -> set[tuple[int, int]]:
    """Returns the pairs of pp_ranks that nearly every step uses: inputs, neighbours, tied ends."""
    pairs = {(0, rank) for rank in range(1, pp_size)}
    pairs |= {(rank, rank + 1) for rank in range(pp_size - 1)}
    pairs |= {(0, pp_size - 1)}
    return pairs | {(target, source) for source, target in pairs}


def _filled(plan: Plan, values: Mapping[int, torch.Tensor]) -> Any:
    return fill(plan.graph.result, Value, lambda value: values[value.index])


def _constants(obj: Any) -> list[object]:
    """Returns the plain Python values in arguments; a recording holds them as constants."""
    if isinstance(obj, bool | int | float | complex | str | type(None)):
        return [obj]
    if isinstance(obj, dict):
        return [item for key, value in obj.items() for item in (str(key), *_constants(value))]
    if isinstance(obj, list | tuple | set | frozenset):
        return [item for value in obj for item in _constants(value)]
    return [type(obj).__qualname__]
