"""A step with several partitions: its Python runs in lockstep, then its tensors are computed.

What a call does, on every rank of a pipeline; each line is a call in ``PipelinedStep.run``:

1. agree: rank 0 of the pipeline says what it was called with, and what its microbatches did; the
   others take its word. From here on the call is one ``MiniBatch``.
2. passes: the body runs for each microbatch, answered from what is known of it. In the first call
   that decides the partition; where a microbatch does something new, the ranks compare plans.
3. prepare: the plans are scheduled; the same combination only once.
4. exchange: the inputs that a rank computes with are sent to it.
5. execute: the executor runs the schedule.
6. share: returned tensors go to all ranks. Then gradients are reduced.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.planning.simulator import TimedAction, Timeline, Transfer
from smdistributed.modelparallel.torch.absence.following import bring_arguments
from smdistributed.modelparallel.torch.activations.horizon import Pass
from smdistributed.modelparallel.torch.activations.kept import SavingHooks
from smdistributed.modelparallel.torch.compat.private.distributed import collectives_seen
from smdistributed.modelparallel.torch.execute.compiled_runs import CompiledRuns
from smdistributed.modelparallel.torch.execute.executor import Executor
from smdistributed.modelparallel.torch.execute.passes import Computation, Inputs
from smdistributed.modelparallel.torch.execute.replay import Replay
from smdistributed.modelparallel.torch.execute.split_programs import SplitPlan
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.gradients.shards import running
from smdistributed.modelparallel.torch.model.distributed import (
    DistributedModel,
    models_of,
    unmade,
)
from smdistributed.modelparallel.torch.planning.passes_held import passes_held
from smdistributed.modelparallel.torch.random.step_seed import StepSeed
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.trace.tree import EntryKind
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.state.switches import without_autocast
from smdistributed.modelparallel.torch.stepping.absent_gradients import AbsentGradients
from smdistributed.modelparallel.torch.stepping.batch import MiniBatch
from smdistributed.modelparallel.torch.stepping.first_shapes import give_shapes
from smdistributed.modelparallel.torch.stepping.inputs import StepInputs
from smdistributed.modelparallel.torch.stepping.lockstep import Lockstep
from smdistributed.modelparallel.torch.stepping.offloaded import (
    compiled_with_checkpointing,
    offloading_of,
)
from smdistributed.modelparallel.torch.stepping.on_fakes import StepOnFakes
from smdistributed.modelparallel.torch.stepping.pass_times import PassTimes
from smdistributed.modelparallel.torch.stepping.preparing import Preparation, Prepared
from smdistributed.modelparallel.torch.stepping.replaying import Replays
from smdistributed.modelparallel.torch.stepping.results import combine
from smdistributed.modelparallel.torch.stepping.sharing import share_results
from smdistributed.modelparallel.torch.stepping.split_segments import SplitSegments
from smdistributed.modelparallel.torch.stepping.static import StaticPasses
from smdistributed.modelparallel.torch.tensors.nested import tensors_in


class PipelinedStep(StepOnFakes):
    """Runs a step function with several partitions, or captured with one.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        rules: which arguments are split.
        detach_outputs: must be True: results come from other processes, without their graphs.
        static: the caller promises that the Python of the function is always the same.
        replays: its mini-batches that run as captured, if passes are captured as CUDA graphs.
        compiled: compiles what lies between modules; None: it runs as it is.
        sequences: finds out how sequences are computed that several ranks share, if they do.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        function: Callable[..., Any],
        rules: SplitRules,
        detach_outputs: bool,
        static: bool,
        replays: Replays | None,
        compiled: CompiledRuns | None,
        sequences: SplitSegments | None = None,
    ) -> None:
        if not detach_outputs:
            raise UnsupportedError(
                "detach_outputs=False needs pipeline_parallel_degree 1: with more partitions the "
                "returned tensors come from other processes."
            )
        super().__init__(runtime)
        self._function = function
        self._inputs = StepInputs(runtime, rules)
        self._sequences = sequences
        compiles_runs = compiled is not None
        lockstep = Lockstep(runtime, function, self._running, compiles_runs=compiles_runs)
        name = getattr(function, "__name__", str(function))
        self._passes = StaticPasses(lockstep, name) if static else lockstep
        self._preparation = Preparation(runtime, compiled)
        self._pass_times = PassTimes(runtime, self._preparation)
        self._absent_gradients = AbsentGradients(runtime)
        self.offloading = offloading_of(runtime, name)
        self._replays = replays
        #: Models that it has called, and the numbers of all that there were in the last call.
        self._watched: weakref.WeakSet[DistributedModel] = weakref.WeakSet()
        self._numbers: set[int] = set()
        self._ran: tuple[Executor, list[Any]] | None = None
        self._has_drawn = False

    # ------------------------------------------------------------------ a call

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one mini-batch; see ``StepFunction``."""
        self.runtime.departures.check_intact()
        bring_arguments(tensors_in((args, kwargs)))
        if self.runtime.published is not None:
            self.runtime.published.begin_step()
        self._give_shapes(args, kwargs)
        for model in models_of(self.runtime):
            model.refresh()
            if not model.holder.partitioned:
                model.holder.note_views()
        seed = StepSeed()
        try:
            batch = self._inputs.agree(
                args,
                kwargs,
                self.runtime.tensor_group.begin_step(seed.number),
                self._passes.recall,
                None if self._sequences is None else self._sequences.agree,
            )
            self._follow_models(batch)
            if self._sequences is not None:
                self._sequences.check(batch)
            if self._replays is not None:
                self._replays.start(batch)
            # Before questions about activations, which replicas need not ask alike.
            shared = self._share_buffers(self._watched)
            with self._inputs.misfits_named(batch):
                passed = self._passes.passes(batch)
            python_drew = self.runtime.random.has_drawn
        finally:
            self.runtime.random.end()
        self._inputs.check_written(batch, [each.graph.written for each in passed])
        splits: tuple[SplitPlan, ...] = ()
        if self._sequences is not None:
            with self._trying():
                splits = self._sequences.of(passed, batch)
        prepared = self._preparation.of(tuple(each.plan for each in passed), splits)
        self._tell_of_passes(prepared)
        constants = [each.constants_read() for each in passed]
        scales = _scales(self._differentiated_by(passed), batch.weights)
        trained = self._models_of(prepared.differentiated)
        called = self._models_of(prepared.modules)
        self._share_buffers([model for model in called if model not in shared])
        self._watch(called)
        with self._telling_others(), self._inputs.misfits_named(batch):
            results = self._computed(prepared, batch, passed, constants, scales)
            for model in trained:
                model.data_parallel.end_step()
        if not (self._drawn_by_any(prepared) or python_drew):
            seed.give_back()
        self._absent_gradients.end(prepared, trained)
        for model in models_of(self.runtime):
            model.rest()
            model.holder.end_step()
        for model in trained:
            model.run_post_step_hooks()
        assert self._ran is not None
        self._pass_times.note(prepared, self._ran[1])
        return combine(results, batch.weights, detach=True)

    def timeline(self) -> Timeline:
        """See ``StepFunction.timeline``."""
        if self._ran is None:
            raise SMPError("the step function has not run yet.")
        executor, marks = self._ran
        own = executor.timed(marks), executor.sent(), executor.needed()
        everyone = self.runtime.communicator.allgather(own, CommGroup.PP_GROUP)
        start = min(one.start for actions, *_ in everyone for one in actions)
        reading = {message: action for *_, needed in everyone for message, action in needed}
        return Timeline(
            tuple(
                tuple(
                    TimedAction(one.action, one.start - start, one.end - start) for one in actions
                )
                for actions, *_ in everyone
            ),
            measured_transfers=tuple(
                Transfer(action, reading[message], num_bytes)
                for _, sent, _ in everyone
                for message, action, num_bytes in sent
            ),
        )

    def _models_of(self, modules: set[nn.Module]) -> list[DistributedModel]:
        """Returns the models that modules belong to; the same on every rank."""
        return [
            model
            for model in models_of(self.runtime)
            if not modules.isdisjoint(model.holder.fakes.names)
        ]

    def _drawn_by_any(self, prepared: Prepared) -> bool:
        """Whether a rank has drawn random numbers. Collective: PP_GROUP, if that alone tells."""
        if prepared.draws is not None:
            return prepared.draws
        return any(self.runtime.communicator.allgather(self._has_drawn, CommGroup.PP_GROUP))

    def _share_buffers(self, called: Collection[DistributedModel]) -> list[DistributedModel]:
        """Gives models the buffers of their first replicas; returns them. Collective: DP_GROUP."""
        models = [model for model in models_of(self.runtime) if model in called]
        for model in models:
            model.data_parallel.share_buffers()
        return models

    def _differentiated_by(self, passed: Sequence[Passed]) -> list[DistributedModel]:
        """Returns the models by which the script asked for gradients."""
        roots = {
            entry.target
            for each in passed
            if each.way is not None
            for entry in each.way.entries
            if entry.kind is EntryKind.BACKWARD
        }
        return [model for model in models_of(self.runtime) if model.get_module() in roots]

    def _tell_of_passes(self, prepared: Prepared) -> None:
        """Has it known what passes hold, before the first of a training runs."""
        ahead, num_ranks = self.runtime.passes, self.runtime.topology.pp_size
        if prepared.differentiated and not ahead.knows(self._function):
            held = passes_held(prepared.plans, prepared.schedule, num_ranks)
            if held is not None:
                ahead.note(self._function, held)

    # ------------------------------------------------------------------ models that go

    def _watch(self, models: Sequence[DistributedModel]) -> None:
        """Lets go of models with the last of them: no rank computes then.

        Else with the next call: ranks must forget the same things at the same time.
        """
        for model in models:
            if model not in self._watched:
                self._watched.add(model)
                weakref.finalize(model, _end, weakref.ref(self)).atexit = False

    def _give_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives shapes to lazy modules that no call has given one."""
        fakes = [
            model.holder.fakes
            for model in models_of(self.runtime)
            if not model.partitioned and unmade(model.get_module()) is not None
        ]
        if fakes:
            runtime = self.runtime
            with self._trying():
                calls = self._inputs.calls(args, kwargs)
                give_shapes(fakes, self._function, calls, runtime.fake_mode, runtime.device)

    def _follow_models(self, batch: MiniBatch) -> None:
        """Lets go of models that are gone, by the word of rank 0 of the pipeline."""
        if batch.header.recalled is None:
            numbers = {number for number, *_ in batch.header.kind.state.models}
            if not self._numbers <= numbers:
                self.let_go()
            self._numbers = numbers

    def let_go(self) -> None:
        """Forgets what is known of steps, and the models with it."""
        self._passes.let_go()
        self._preparation.let_go()
        if self._sequences is not None:
            self._sequences.let_go()
        if self._replays is not None:
            self._replays.let_go()

    # ------------------------------------------------------------------ execution

    @contextlib.contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Inside, others may wait for this rank, and learn of it if it fails."""
        try:
            yield
        except Exception as error:
            self.runtime.departures.report(error)
            raise

    def _computed(
        self,
        prepared: Prepared,
        batch: MiniBatch,
        passed: Sequence[Passed],
        constants: Sequence[Sequence[torch.Tensor]],
        scales: Sequence[Scale],
    ) -> list[Any]:
        """Returns the results of a mini-batch's microbatches. Collective: PP_GROUP."""
        runtime = self.runtime
        written_to = {position for each in passed for position in each.graph.written}
        given = self._inputs.exchange(batch, prepared.needed_inputs, written_to)
        tensors = [[*arguments, *read] for arguments, read in zip(given, constants, strict=True)]
        self._absent_gradients.begin(prepared, self._models_of(prepared.differentiated))
        made = self._execute(prepared, batch, tensors, scales)
        self._inputs.sent()
        results, written = share_results(
            runtime.links, runtime.coordinates.pp_rank, runtime.device, passed, tensors, made
        )
        self._inputs.write(batch, written)
        return results

    def _execute(
        self,
        prepared: Prepared,
        batch: MiniBatch,
        inputs: Inputs,
        scales: Sequence[Scale],
    ) -> list[dict[int, torch.Tensor]]:
        models = self._models_of(prepared.modules)
        for model in models:
            model.data_parallel.begin_step()
        random = self.runtime.random
        random.begin(batch.header.seed)

        final = iter(prepared.final_gradients)
        # Between two passes Python's code is out of the caches: what need not run costs most.
        reduced = [model.data_parallel for model in models if model.data_parallel.reduces]

        positions = itertools.count()
        offloading = self.offloading

        def enter_pass(kind: Kind, microbatch: int) -> None:
            if offloading is not None and kind is not Kind.WEIGHT_GRADIENTS:
                offloading.enter(next(positions))
            random.enter_pass(microbatch, backward=kind.is_backward)
            completes = next(final) if kind.completes else frozenset()
            for each in reduced:
                each.enter_pass(completes)

        try:
            with (
                without_autocast(("cpu", self.runtime.device.type)),
                running([model.data_parallel.shards for model in models]) as saving,
                self._offloaded(prepared, saving),
                self._in_modules(),
            ):
                acting = self._acting(prepared, batch, models, inputs, scales)
                with prepared.passes.putting_off():
                    marks = prepared.executor.run(acting, enter_pass)
            if self._replays is not None and isinstance(acting, Computation):
                self._replays.note(prepared, acting)
        finally:
            self._has_drawn = random.has_drawn
            if not random.end():
                self._has_drawn = True
                # A module drew that was not known to: it is found in the next step.
                for model in models:
                    model.drawing.learn()
        self._ran = prepared.executor, marks
        return acting.results

    @contextlib.contextmanager
    def _in_modules(self) -> Iterator[None]:
        """Inside, code of modules runs, which those that have other modules do not run."""
        runtime = self.runtime
        reach, partition = runtime.communicator.reach, runtime.coordinates.pp_rank

        def see(name: str, group: dist.ProcessGroup) -> None:
            reach.check(f"torch.distributed.{name}", dist.get_process_group_ranks(group))

        others = runtime.topology.members(CommGroup.DP_CP_GROUP, runtime.rank)
        where = f"in a module, or a hook, that the ranks of partition {partition} run alone"
        with reach.only(others, where), collectives_seen(see):
            yield

    def _acting(
        self,
        prepared: Prepared,
        batch: MiniBatch,
        models: Sequence[DistributedModel],
        inputs: Inputs,
        scales: Sequence[Scale],
    ) -> Computation | Replay:
        """Returns what computes a mini-batch: its Python, or what was captured of it."""
        if self._replays is None:
            return Computation(prepared.passes, inputs, scales)
        random = self.runtime.random

        def enter_pass(kind: Kind, microbatch: int) -> None:
            random.enter_pass(microbatch, backward=kind.is_backward)

        acting = self._replays.of(batch, prepared, models, inputs, scales, enter_pass)
        random.begin(batch.header.seed)  # a capture counts passes
        return acting

    def _offloaded(
        self, prepared: Prepared, saving: SavingHooks
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, the activations of checkpointed calls are offloaded, if that is asked for."""
        if self.offloading is None:
            return contextlib.nullcontext()
        compiled = compiled_with_checkpointing(models_of(self.runtime))
        has_regions = bool(compiled) or any(
            node.region is not None for plan in set(prepared.plans) for node in plan.graph.nodes
        )
        if prepared.differentiated and not has_regions:
            self.offloading.warn()
        passes = [
            Pass(each.segment, each.microbatch, each.kind.is_backward)
            for each in prepared.executor.actions
            if each.kind is not Kind.WEIGHT_GRADIENTS
        ]
        return self.offloading.running(passes, saving, compiled)


def _end(step: weakref.ref[PipelinedStep]) -> None:
    """Hears that a model is gone."""
    if (found := step()) is not None and not found.runtime.live_models():
        found.let_go()


def _scales(models: Sequence[DistributedModel], weights: Sequence[float]) -> list[Scale]:
    """Returns by what the losses of each microbatch count.

    Args:
        models: by which gradients are asked for.
        weights: the share of each microbatch in the batch.
    """
    kinds = {model.data_parallel.gradient_scale for model in models}
    if len(kinds) > 1:
        raise UnsupportedError(
            "models with different average_grads_across_microbatches were differentiated in one "
            "step function; give them the same value."
        )
    loss_scales = {id(each): each for each in (model.apply_loss_scale() for model in models)}
    if len(loss_scales) > 1:
        raise UnsupportedError(
            "models with different loss scales were differentiated in one step function; give "
            "them one DistributedOptimizer."
        )
    (loss_scale,) = loss_scales.values() or (None,)
    shares = [weight if kinds != {"sum"} else 1.0 for weight in weights]
    return [share if loss_scale is None else loss_scale * share for share in shares]
