"""A step with one partition: the body runs as it is, once for each microbatch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.microbatch import SplitRules, split_arguments
from smdistributed.modelparallel.torch.activations.horizon import Pass
from smdistributed.modelparallel.torch.activations.kept import SavingHooks
from smdistributed.modelparallel.torch.compat.between import atomic, no_call
from smdistributed.modelparallel.torch.compat.private.backward import (
    engine_replaced,
    is_of_freed_graph,
)
from smdistributed.modelparallel.torch.compat.private.modes import is_of_control_flow
from smdistributed.modelparallel.torch.execute.bodies import AsTheyAre, Bodies, Call
from smdistributed.modelparallel.torch.execute.starts import Scale, differentiate
from smdistributed.modelparallel.torch.execute.surroundings import takes_part
from smdistributed.modelparallel.torch.gradients.shards import running
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.random.keys import DrawByDraw
from smdistributed.modelparallel.torch.random.step_seed import StepSeed
from smdistributed.modelparallel.torch.record.leaves.modules import STEP_FUNCTION
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.runtime.tensors import TENSORS
from smdistributed.modelparallel.torch.stepping.body_captures import BodyCaptures
from smdistributed.modelparallel.torch.stepping.graphs_kept import GraphsKept
from smdistributed.modelparallel.torch.stepping.loss_backward import SetGradients, stand_in
from smdistributed.modelparallel.torch.stepping.misfits import misfits_named
from smdistributed.modelparallel.torch.stepping.moving import Mover
from smdistributed.modelparallel.torch.stepping.offloaded import (
    compiled_with_checkpointing,
    offloading_of,
)
from smdistributed.modelparallel.torch.stepping.results import combine
from smdistributed.modelparallel.torch.stepping.split_sequences import SplitSequences
from smdistributed.modelparallel.torch.tensor_parallel.backward_passes import PassesAlone
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    slices_as_they_are,
    slices_guarded,
)
from smdistributed.modelparallel.torch.tensors.nested import map_tensors


class EagerStep:
    """Runs a step function with one partition.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        rules: which arguments are split.
        detach_outputs: detach returned tensors.
        captures: makes what captures its microbatches as CUDA graphs, if anything does.
        sequences: runs microbatches whose sequences are split over ranks; None without.
    """

    is_tracing = False

    def __init__(
        self,
        runtime: TorchRuntime,
        function: Callable[..., Any],
        rules: SplitRules,
        detach_outputs: bool,
        captures: Callable[[Callable[[], None]], BodyCaptures | None],
        sequences: SplitSequences | None = None,
    ) -> None:
        self.runtime = runtime
        self._function = function
        self._rules = rules
        self._mover = Mover(runtime.device, rules)
        self._detach_outputs = detach_outputs
        self._weight = 1.0
        self._microbatch = 0
        self._is_last = False
        self._calls = 0
        self._usual_calls = 0
        self._flags: tuple[object, ...] | None = None
        self.is_differentiating = False
        self._forget_models()
        self._name = getattr(function, "__name__", str(function))
        self.offloading = offloading_of(runtime, self._name)
        self._captures = captures(self._begin_pass_of_loss) if detach_outputs else None
        self._bodies: Bodies = AsTheyAre()
        self._sequences = sequences
        self._together = runtime.tensor_group.passes or PassesAlone()
        # What is offloaded leaves the device when it has been used once.
        self._graphs_kept = GraphsKept(finds_out=self.offloading is None)
        #: Functions that draw random numbers outside all modules; None if that is not known.
        self._drawing: frozenset[Any] | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one mini-batch; see ``StepFunction``."""
        runtime = self.runtime
        given, moved = self._mover.move(args, kwargs)
        most = runtime.config.microbatches
        calls, weights = split_arguments(TENSORS, self._rules, most, *given)
        models = models_of(runtime)
        for model in models:
            model.refresh()
        self._learn_draws(models)
        random = runtime.random
        taken = StepSeed()
        seed = taken.number
        if self._sequences is not None:
            seed = self._sequences.agree(seed, *given)
        random.begin(runtime.tensor_group.begin_step(seed))
        results = []
        around = takes_part()
        is_part = len(calls) > 1 or any(each.data_parallel.reduces for each in models)
        self.set_gradients = SetGradients(
            lambda: (pair for model in models for pair in model.local_named_parameters()),
            is_part=is_part,
        )
        try:
            for model in models:
                model.data_parallel.share_buffers()
                model.data_parallel.begin_step()
            runtime.current_step = self
            with contextlib.ExitStack() as stack:
                saving = stack.enter_context(
                    running([model.data_parallel.shards for model in models])
                )
                stack.enter_context(self._offloaded(len(calls), saving))
                stack.enter_context(engine_replaced(stand_in(self)))
                stack.enter_context(self._together.in_step(self._serving))
                if self._captures is not None:
                    self._bodies = self._captures.of(
                        calls, weights, models, around, self._enter_captured
                    )
                guards = (model.holder.fakes.slice_guard for model in models)
                stack.enter_context(slices_guarded(guards))
                stack.enter_context(misfits_named(self._rules, len(calls), lambda: given))
                for microbatch, (call, weight) in enumerate(zip(calls, weights, strict=True)):
                    if microbatch:
                        self._usual_calls = self._calls
                    self._calls = 0
                    self._together.leave_microbatch()
                    self._microbatch, self._weight = microbatch, weight
                    self._is_last = microbatch == len(calls) - 1
                    self._enter_pass(backward=False)
                    result = self._bodies.run(call, self._body)
                    if self._detach_outputs and self._graphs_kept.are_kept:
                        result = map_tensors(result, torch.Tensor.detach)  # they go with it
                    results.append(result)
                    self.set_gradients.check()
                    self._graphs_kept.end_microbatch()
                has_drawn, has_gradients = self._done_by_any(models)
        finally:
            runtime.current_step = None
            self._bodies = AsTheyAre()
            self._forget_models()
            self._graphs_kept.forget()
            if not random.end():
                self._flags = None
        if not has_drawn:
            taken.give_back()
        for model, has in zip(models, has_gradients, strict=True):
            if has:
                model.data_parallel.end_step()
            model.take_growth()
            model.rest()
            if has:
                model.run_post_step_hooks()
        self._usual_calls = self._calls
        self._mover.end(moved)
        return combine(results, weights, detach=self._detach_outputs)

    def _forget_models(self) -> None:
        """Keeps no model of the last call: one may be gone before the step function is."""
        self._reached: dict[DistributedModel, None] = {}
        self.set_gradients = SetGradients(lambda: (), is_part=False)

    def _done_by_any(self, models: Sequence[DistributedModel]) -> tuple[bool, list[bool]]:
        """Returns what the step has done on any rank that computes with this.

        Collective: TP_GROUP.

        Returns:
            whether it has drawn random numbers; which models it has differentiated.
        """
        # A backward pass through one model can reach another.
        here = [each in self._reached or each.data_parallel.has_gradients for each in models]
        has_drawn, *is_by_others = self.runtime.tensor_group.end_step(
            [self.runtime.random.has_drawn, *here]
        )
        return has_drawn, [
            own or each.data_parallel.has_gradients or other
            for own, each, other in zip(here, models, is_by_others, strict=True)
        ]

    def _body(self, call: Call) -> Any:
        """Runs one microbatch."""
        with self._own_draws():
            if self._sequences is not None:
                return self._sequences.run(call, self._result)
            return self._result(call)

    def _enter_captured(self, microbatch: int) -> None:
        """Says that a microbatch is captured."""
        self._microbatch = microbatch
        self._enter_pass(backward=False)

    def _result(self, call: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
        """Calls the user's function for one microbatch."""
        try:
            return self._function(*call[0], **call[1])
        except Exception as error:
            if is_of_control_flow(error):
                raise UnsupportedError(
                    "torch's own control flow (torch.cond, while_loop and the like) does not run "
                    "inside a step function, whose random numbers are seen call by call: put it "
                    "into a module and call that module's compile(), or branch in Python."
                ) from error
            raise

    def backward(
        self, model: DistributedModel, tensors: Any, grad_tensors: Any, *, retain_graph: bool
    ) -> None:
        """Differentiates one microbatch; its gradients count by its share of the batch."""
        if self._sequences is None:
            self._differentiate_loss(model, tensors, grad_tensors, retain_graph=retain_graph)
        elif not self._sequences.is_looking:
            with self._sequences.differentiating(tensors):
                self._differentiate_loss(model, tensors, grad_tensors, retain_graph=retain_graph)

    def _differentiate_loss(
        self, model: DistributedModel, tensors: Any, grad_tensors: Any, *, retain_graph: bool
    ) -> None:
        self._reached[model] = None
        scale = self._scale_of(model)
        keeps = self._keeps_next(tensors) or retain_graph
        if retain_graph or (keeps and self._graphs_kept.are_shared):
            self._bodies.refuse("a backward pass keeps its graph")
        run = functools.partial(self._pass_of_scaled, retain_graph=keeps)
        self.differentiate(lambda: differentiate(tensors, grad_tensors, scale, run))

    @no_call
    def _keeps_next(self, tensors: Any) -> bool:
        return self._graphs_kept.keeps_next(tensors)

    @atomic
    def _pass_of_scaled(self, tensors: Any, starts: Any, *, retain_graph: bool) -> None:
        """Runs a backward pass whose losses are scaled already."""
        with self._differentiating_scaled():
            self.start(tensors, starts, retain_graph=retain_graph)

    @contextlib.contextmanager
    def _differentiating_scaled(self) -> Iterator[None]:
        former, self.is_differentiating = self.is_differentiating, True
        try:
            yield
        except RuntimeError as error:
            if not is_of_freed_graph(error):
                raise
            raise SMPError(
                "model.backward was called for a loss whose graph a backward pass before has let "
                f"go of, in step function {self._name}, whose first microbatch did not need it "
                "again, or has compiled modules. Of losses that share a graph give all at "
                "once, model.backward([one, other]), or say retain_graph=True in all calls but "
                "the last: model.backward(one, retain_graph=True)."
            ) from error
        finally:
            self.is_differentiating = former

    def _scale_of(self, model: DistributedModel) -> Scale:
        scale: Scale = self._weight if model.data_parallel.gradient_scale == "mean" else 1.0
        loss_scale = model.apply_loss_scale()
        return scale if loss_scale is None else loss_scale * scale

    def scale_of_losses(self) -> Scale:
        """Returns what losses of ``loss.backward()`` count by, which names no model.

        Raises:
            SMPError: models scale them differently.
        """
        models = models_of(self.runtime)
        if not models:
            return self._weight
        kinds = {each.data_parallel.gradient_scale for each in models}
        scales = [self._scale_of(each) for each in models]
        if any(isinstance(each, torch.Tensor) for each in scales):
            self._bodies.refuse("a loss is scaled by a number of the device")
        if len(kinds) > 1 or any(each.scaled_by is not models[0].scaled_by for each in models):
            raise SMPError(
                "backward of a loss, in a step function, was called where several models scale "
                "gradients differently (average_grads_across_microbatches, or a loss scale of "
                "fp16): call backward of the DistributedModel that the loss is of."
            )
        # Of those that reduce gradients it shows which have some.
        is_one = len(models) == 1
        self._reached.update(
            dict.fromkeys(each for each in models if is_one or not each.data_parallel.reduces)
        )
        return scales[0]

    def differentiate(self, run: Callable[[], Any]) -> Any:
        """Runs a backward pass of the microbatch in progress."""
        self.set_gradients.check()
        self._begin_pass()
        with slices_as_they_are(), self._bodies.differentiating():
            self.is_differentiating = True
            try:
                result = run()
            finally:
                self.is_differentiating = False
        self._enter_pass(backward=False)
        return result

    @no_call
    def _begin_pass(self) -> None:
        self._calls += 1
        self._enter_pass(backward=True)
        # As many calls as for the microbatch before: then nothing follows that adds to gradients.
        is_last = self._is_last and self._calls == self._usual_calls
        with slices_as_they_are():
            for each in models_of(self.runtime):
                if is_last:
                    each.data_parallel.enter_last_pass()
                else:
                    each.data_parallel.enter_pass(frozenset())

    def _begin_pass_of_loss(self) -> None:
        """Does what comes before a backward pass of a loss, which names no model."""
        self.scale_of_losses()
        self._begin_pass()
        self._enter_pass(backward=False)

    def start(self, tensors: Any, starts: Any, *, retain_graph: bool = False) -> None:
        """Does what ``torch.autograd.backward`` does, on all ranks that compute together."""
        self._together.backward(tensors, starts, retain_graph=retain_graph)
        if self._together.has_differed:
            self._bodies.refuse("ranks that compute together differentiate different modules")

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """Inside, a backward pass runs of which the script of other ranks alone knows."""
        self._enter_pass(backward=True)
        for each in models_of(self.runtime):
            each.data_parallel.enter_pass(frozenset())
        was_differentiating, self.is_differentiating = self.is_differentiating, True
        try:
            yield
        finally:
            self.is_differentiating = was_differentiating
        self._enter_pass(backward=False)

    def _enter_pass(self, *, backward: bool) -> None:
        """Says which pass is computed next."""
        self.runtime.random.enter_pass(self._microbatch, backward=backward)
        if self.offloading is not None:
            self.offloading.enter(2 * self._microbatch + backward)

    @contextlib.contextmanager
    def _offloaded(self, num_microbatches: int, saving: SavingHooks) -> Iterator[None]:
        """Inside, the activations of checkpointed calls are offloaded, if that is asked for."""
        if self.offloading is None:
            yield
            return
        passes = [
            Pass(0, microbatch, is_backward)
            for microbatch in range(num_microbatches)
            for is_backward in (False, True)
        ]
        compiled = compiled_with_checkpointing(models_of(self.runtime))
        with self.offloading.running(passes, saving, compiled):
            yield
        if self._reached and not self.offloading.has_regions:
            self.offloading.warn()

    @contextlib.contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Keys the draws of the step function itself, outside all modules."""
        if self._drawing == frozenset():
            yield
            return
        random = self.runtime.random
        mode = DrawByDraw(random, STEP_FUNCTION, 0, self._drawing)
        random.entered.append(mode)
        try:
            with mode:
                yield
        finally:
            random.entered.pop()
        self._drawing = frozenset(mode.drew) | (self._drawing or frozenset())

    def _learn_draws(self, models: list[DistributedModel]) -> None:
        """Has it found out who draws random numbers, if that may have changed.

        Whoever drew without a key, since a branch had not been taken before, is found in the next
        step.
        """
        flags = tuple(
            (
                model.number,
                model.holder.version,
                tuple(module.training for module in model.holder.fakes.names),
            )
            for model in models
        )
        if flags == self._flags:
            return
        self._flags = flags
        self._drawing = None
        for model in models:
            model.drawing.learn()
