"""A step whose job is being planned: it is recorded, its profile written, and the process ends.

Nothing is computed, and no model is placed, so that parameters that are delayed take no memory. A
step without gradients, as before the training, is recorded too, and gives zeros.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.microbatch import SplitRules, tensors_to_cut
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.search.profile import (
    Graphs,
    ModelProfile,
    Precision,
    UnitProfile,
)
from smdistributed.modelparallel.torch.activations.blocks import stacks_of
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.model.replacing import sliced_modules
from smdistributed.modelparallel.torch.optimizer.kept_state import kept_bytes
from smdistributed.modelparallel.torch.planning.passes_held import PassesHeld
from smdistributed.modelparallel.torch.planning.tape_timing import kind_of, timed_tape
from smdistributed.modelparallel.torch.planning.unit_profile import (
    Timed,
    beside_modules,
    unit_profile,
)
from smdistributed.modelparallel.torch.random.step_seed import StepSeed
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.costs.work import Operations, Work
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.questions.decisions import OwnDecisions
from smdistributed.modelparallel.torch.record.recorder import Recorder
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.tree import EntryKind, Trace
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.runtime.tensors import TENSORS
from smdistributed.modelparallel.torch.sharding.layout import is_cut
from smdistributed.modelparallel.torch.state.python_random import python_random_kept
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.stepping.batch import Call, MiniBatch
from smdistributed.modelparallel.torch.stepping.inputs import StepInputs
from smdistributed.modelparallel.torch.stepping.on_fakes import StepOnFakes
from smdistributed.modelparallel.torch.stepping.placing import kept_whole
from smdistributed.modelparallel.torch.stepping.results import combine
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, tensors_in
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

logger = logging.getLogger(__name__)


class PlannedStep(StepOnFakes):
    """Records a step function in a process whose job is being planned.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        rules: which arguments are split.
        graphs: whether passes are to be captured as CUDA graphs.
        device: the kind of device that is planned for; "" for the one of this process.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        function: Callable[..., Any],
        rules: SplitRules,
        graphs: Graphs,
        device: str,
    ) -> None:
        super().__init__(runtime)
        self._device = device
        self._function = function
        self._name = getattr(function, "__name__", str(function))
        self._rules = rules
        self._inputs = StepInputs(runtime, rules)
        self._graphs = graphs

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call; ends the process if it trains.

        Raises:
            UnsupportedError: the step trains several models, or none.
        """
        recorded = self.recorded(args, kwargs)
        if not isinstance(recorded, ModelProfile):
            return recorded
        assert self.runtime.planning is not None
        return self.runtime.planning.end(recorded)

    def recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call; returns its profile, or zeros in place of its results if none trains.

        Raises:
            UnsupportedError: the step trains several models, or none.
        """
        for model in models_of(self.runtime):
            model.refresh()
        try:
            batch = self._inputs.agree(args, kwargs, StepSeed().number, lambda batch: None)
            operations = Operations() if self._times else None
            made, meter = self._recorded(batch, batch.calls[0], operations)
            if not _trains(made):
                results = [map_tensors(made.result, _zeros)] * len(batch.calls)
                return combine(results, batch.weights, detach=True)
            timed = [] if operations is None else self._timed(batch, made, meter, operations)
        finally:
            self.runtime.random.end()
        return self._profile(batch, made, meter, timed)

    def looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call as ``recorded`` does, and leaves nothing of it behind.

        Raises:
            UnsupportedError: the call changes something that cannot be put back.
        """
        with self._put_back():
            return self.recorded(args, kwargs)

    def held(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PassesHeld | None:
        """Records a call; returns what the passes of one process hold, if it trains. Local.

        Raises:
            UnsupportedError: the call changes something that cannot be put back.
        """
        with self._put_back():
            for model in models_of(self.runtime):
                model.refresh()
            try:
                batch = self._inputs.agree(args, kwargs, StepSeed().number, lambda batch: None)
                passed, _ = self._recorded(batch, batch.calls[0])
            finally:
                self.runtime.random.end()
        tape = passed.profile.tape
        if not _trains(passed) or tape is None:
            return None
        memory = tape.memory([(0, tape.num_operations)])
        most = max(memory.most_in(Kind.FORWARD), memory.most_in(Kind.BACKWARD))
        return PassesHeld(most, memory.kept, 1, _given_bytes(batch))

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        """Inside, a step is recorded; at the end everything is as it was."""
        modules = [each for model in models_of(self.runtime) for each in model.modules()]
        with torch.random.fork_rng(devices=[]), python_random_kept():
            before = Snapshot(modules, [self._function])
            try:
                yield
            finally:
                before.note_changes()
                before.put_all_back()

    @property
    def _times(self) -> bool:
        """Whether this process has a device of the kind that is planned for."""
        own = kind_of(self.runtime.device)
        return own == self._device or (not self._device and own not in ("", "cpu"))

    def _timed(
        self, batch: MiniBatch, made: Passed, meter: Meter, operations: Operations
    ) -> list[Timed]:
        """Times microbatches of several sizes.

        Args:
            batch: that was called.
            made, meter, operations: of its first microbatch.
        """
        found = []
        size = self._batch_size(batch)
        examples = round(size * batch.weights[0])
        for number in _sizes(examples, size):
            if number != examples:
                calls, _ = self._inputs.split(batch.given, size // number)
                operations = Operations()
                try:
                    made, meter = self._recorded(batch, calls[0], operations)
                except Exception:  # as a norm of a batch refuses one example
                    logger.debug("%d examples are not timed", number, exc_info=True)
                    continue
            assert meter.tape is not None
            tape = timed_tape(meter.tape, operations, self.runtime.device)
            if tape is not None:
                found.append(Timed(number / examples, made.profile, tape))
        return sorted(found, key=lambda each: each.factor)

    def _batch_size(self, batch: MiniBatch) -> int:
        cut = list(tensors_to_cut(TENSORS, self._rules, *batch.given).values())
        return cut[0][0].shape[cut[0][1]] if cut else len(batch.calls)

    def _profile(
        self, batch: MiniBatch, made: Passed, meter: Meter, timed: Sequence[Timed]
    ) -> ModelProfile:
        planning = self.runtime.planning
        config = self.runtime.config if planning is None else planning.config
        state_bytes, optimizers, notes = kept_bytes(self.runtime)
        if not optimizers:
            notes.append(
                "no smp.DistributedOptimizer was made before the first training step: memory of "
                "optimizers is not counted"
            )
        notes += kept_whole(made.profile)
        shape = self._batch_size(batch)
        model = self._model(made)
        names = model.holder.fakes.names
        stacks = stacks_of(model.get_module())
        options = model.data_parallel.options
        root: UnitProfile = unit_profile(
            model.holder.fakes,
            made.profile,
            state_bytes,
            functools.partial(_is_small, config.sdp_param_persistence_threshold),
            sliced_modules(self.runtime, model.get_module()),
            {block for stack in stacks for block in stack},
            timed,
        )
        return ModelProfile(
            framework="pytorch",
            step=self._name,
            optimizer=", ".join(optimizers),
            batch=shape,
            examples=round(shape * batch.weights[0]),
            precision=_precision(meter.work),
            root=root,
            beside=beside_modules(meter.work, meter.bytes, model.get_module(), made.profile, timed),
            tape=made.profile.tape,
            given_bytes=_given_bytes(batch),
            timed_on=kind_of(self.runtime.device) if timed else "",
            settings=config.given(),
            memory_weight=config.memory_weight,
            most_gathered=config.sdp_max_live_parameters,
            has_buckets=not options.gradient_as_bucket_view,
            graphs=self._graphs,
            stacks=tuple(tuple(names[block] for block in stack) for stack in stacks),
            notes=tuple(notes),
        )

    def _model(self, passed: Passed) -> DistributedModel:
        """Returns the one model that the step trains."""
        called = [
            model
            for model in models_of(self.runtime)
            if not passed.profile.modules.keys().isdisjoint(model.holder.fakes.names)
        ]
        if len(called) != 1:
            raise UnsupportedError(
                "the planner plans for steps of one smp.DistributedModel; step function "
                f"{self._name} calls {len(called)}: plan for the larger one in a step of its own."
            )
        return called[0]

    # ------------------------------------------------------------------ recording

    def _recorded(
        self, batch: MiniBatch, call: Call, operations: Operations | None = None
    ) -> tuple[Passed, Meter]:
        """Records a microbatch, and returns what has counted it.

        Args:
            batch: that it is of.
            call: its arguments.
            operations: takes note of each kind of operation.
        """
        runtime = self.runtime
        fakes = [model.holder.fakes for model in models_of(runtime)]
        scene = Scene(fakes, {}, fakes, [self._function])
        meter = Meter(runtime.fake_mode, operations, not_kept=scene.storages)
        recorder = Recorder(
            scene,
            runtime.fake_mode,
            runtime.device,
            runtime.random,
            meter,
            itertools.count().__next__,
        )
        runtime.random.begin(batch.header.seed, rehearsal=True)
        runtime.random.enter_pass(0, backward=False)
        specs = [TensorSpec.of(tensor) for tensor in tensors_in(call)]
        with runtime.fake_mode:
            trace = Trace([each.empty(runtime.device) for each in specs])
        with contextlib.ExitStack() as stack:
            hooks = torch.autograd.graph.saved_tensors_hooks(meter.keep, meter.give)
            stack.enter_context(hooks)
            stack.enter_context(self._running(recorder))
            stack.enter_context(recorder.on_fakes())
            passed = recorder.run(trace, self._function, call, OwnDecisions())
        return passed, meter

    def let_go(self) -> None:
        """Forgets nothing: no call is remembered."""


def _trains(passed: Passed) -> bool:
    """Whether a microbatch has asked for gradients."""
    assert passed.opened is not None
    return any(entry.kind is EntryKind.BACKWARD for entry in passed.opened.log)


def _sizes(examples: int, batch: int) -> list[int]:
    """Returns the examples of microbatches that are timed: those of the script, one, and more."""
    more = (each for each in range(2 * examples, batch + 1) if batch % each == 0)
    return [examples, *({1, next(more, examples)} - {examples})]


def _given_bytes(batch: MiniBatch) -> float:
    return float(sum(each.numel() * each.element_size() for each in tensors_in(batch.given)))


def _is_small(threshold: int, parameter: torch.Tensor) -> bool:
    """Whether a parameter stays whole where others are in shards."""
    return not is_cut(tuple(parameter.shape), parameter.dtype, threshold)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _precision(work: Work) -> Precision:
    """Returns what most products compute in."""
    if 2 * work.half_products > work.products:
        return "half"
    return "single" if torch.get_float32_matmul_precision() == "highest" else "tf32"
