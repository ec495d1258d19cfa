"""The recorder: watches the user's code run on fakes and writes down what it does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private import (
    DATA_DEPENDENT,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    set_grad_enabled,
    version_of,
)
from smdistributed.modelparallel.torch.record.costs import Meter, Profile
from smdistributed.modelparallel.torch.record.decisions import Decisions
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.record.interception import intercepted
from smdistributed.modelparallel.torch.record.ir import Graph, Leaf, NodeKind, Value
from smdistributed.modelparallel.torch.record.leaf_memory import LeafMemory
from smdistributed.modelparallel.torch.record.leaves import LeafRuns
from smdistributed.modelparallel.torch.record.modules import ModuleCalls, Randomness
from smdistributed.modelparallel.torch.record.nested import (
    Path,
    map_tensors,
    opaque_objects,
    placeholders,
    tensor_paths,
    tensors_in,
)
from smdistributed.modelparallel.torch.record.pending import PendingNumber
from smdistributed.modelparallel.torch.record.python_state import StateWatch
from smdistributed.modelparallel.torch.record.questions import Question
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.stand_ins import STAND_INS
from smdistributed.modelparallel.torch.record.switches import changes_since, positions
from smdistributed.modelparallel.torch.record.values import Values

#: Questions about a tensor that leave no trace in a computation.
_UNRECORDED = {
    set_grad_enabled,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
}


class Recorder(TorchFunctionMode):
    """Sees every torch function and every module call while the user's code runs on fakes."""

    def __init__(
        self,
        models: Sequence[FakeModel],
        mode: FakeTensorMode,
        device: torch.device,
        leaves: Mapping[nn.Module, Leaf] | None,
        decisions: Decisions,
        random: Randomness,
        memory: LeafMemory | None = None,
    ) -> None:
        super().__init__()
        self._models = models
        self._mode = mode
        self._device = device
        self._leaves = leaves
        self._decisions = decisions
        self._random = random
        self._meter = Meter()
        self._switches = positions()
        modules = [module for model in models for module in model.names]
        #: The state that glue read.
        self.watch = StateWatch(
            whole=[module for module in modules if leaves is None or module not in leaves]
        )
        self._state = RunState(self.watch, is_profile=leaves is None)
        self._calls = ModuleCalls(models, self._state, mode, self._meter, random)
        self._values = Values(models, self._state, memory, self._calls.where)
        self._leaf_runs = LeafRuns(
            models,
            leaves or {},
            self._state,
            self._values,
            self._calls,
            self._meter,
            mode,
            memory,
            random,
        )
        self._named = set(modules)
        self._decided_by: str | None = None
        #: The numbers that were taken from activations.
        self.pending: list[PendingNumber] = []
        self._real_inputs: list[torch.Tensor] = []

    @property
    def graph(self) -> Graph:
        """What was recorded."""
        return self._values.graph

    @property
    def profile(self) -> Profile:
        """What was measured."""
        return self._calls.profile

    @property
    def leaf_watches(self) -> list[StateWatch]:
        """The state that each leaf read."""
        return self._leaf_runs.watches

    @property
    def decided_by(self) -> str | None:
        """The random numbers that a decision was made from, or a split module drew in Python."""
        if self._calls.python_draws_of is not None:
            return f"Python's random numbers in {self._calls.python_draws_of}"
        return self._decided_by

    # ------------------------------------------------------------------ the run

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs one microbatch of the user's function and returns its result, on fakes."""
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.in_place())
            modules = [module for model in self._models for module in model.names]
            stack.enter_context(intercepted(self, modules))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(self._mode)
            stack.enter_context(self._meter)
            args, kwargs = map_tensors((list(args), dict(kwargs)), self._input)
            with self:
                self.watch.begin(function, opaque_objects((args, kwargs)))
                try:
                    result = function(*args, **kwargs)
                finally:
                    self.watch.end()
                    self._leaf_runs.restore()
            self._leaf_runs.check_shared_state(self.watch)
            self._state.paused += 1  # what follows belongs to us
            self._calls.finish()
        return result

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
        position = len(self._real_inputs)
        self._real_inputs.append(tensor)
        node = self._values.node(NodeKind.INPUT, position, f"input {position}", replicated=True)
        self._values.bind(fake, node, ())
        return fake

    def check_rebound_buffers(self) -> None:
        """Raises if glue code assigned a new tensor to a buffer: a replay would not."""
        assert self._leaves is not None
        for model in self._models:
            for slot in model.rebound:
                if slot[0] not in self._leaves:
                    raise UnsupportedError(
                        f"{model.slot_name(slot)} was assigned a new tensor in the forward of a "
                        "module that is split over partitions. Change it in place, or put the "
                        "module on one partition."
                    )

    def checkpointed(self) -> contextlib.AbstractContextManager[None]:
        """Gives what is recorded inside a region of its own; the outermost one counts."""
        return self._state.checkpointed()

    def value(self, tensor: torch.Tensor) -> Value:
        """Returns the value that a tensor of the run stands for."""
        return self._values.of(tensor)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for one that is the same in every microbatch; else None."""
        return self._values.constant(tensor)

    # ------------------------------------------------------------------ recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._state.paused or func in _UNRECORDED:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            if self._leaves is None:
                return None  # costs of forward passes only
            raise UnsupportedError(
                "with more than one partition, tensor.backward() cannot reach the other "
                "partitions: call model.backward(tensor) on the DistributedModel instead."
            )
        if isinstance(func, OpOverload):
            if self._state.is_glue and "lift_fresh" not in str(func):
                raise UnsupportedError(
                    f"{func} was called from {self._calls.where()} past PyTorch's function "
                    "overrides (a scripted or custom function); put that module on one partition."
                )
            return func(*args, **kwargs)
        name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
        return self.record(NodeKind.CALL, func, name, lambda: func(*args, **kwargs), args, kwargs)

    def record(
        self,
        kind: NodeKind,
        target: Any,
        name: str,
        call: Callable[[], Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Runs ``call`` and records it as one node."""
        if self._state.paused:
            return call()
        StateWatch.pause()
        try:
            with self._state.pausing():
                return self._record(kind, target, name, call, args, kwargs)
        finally:
            self._state.watch.resume()

    def _record(
        self,
        kind: NodeKind,
        target: Any,
        name: str,
        call: Callable[[], Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        where = f"{name} in {self._calls.where()}"
        node_args = self._values.template(tuple(args), where)
        node_kwargs = self._values.template(dict(kwargs), where)
        inputs = list(placeholders((node_args, node_kwargs), Value))
        tensors = tensors_in((args, kwargs))
        versions = [version_of(tensor) for tensor in tensors]
        grad_enabled, autocast = torch.is_grad_enabled(), self._autocast()
        switches = changes_since(self._switches)
        flops, draws = self._meter.flops, self._meter.random_draws
        try:
            if kind is NodeKind.LEAF:
                settings = (
                    grad_enabled,
                    torch.is_inference_mode_enabled(),
                    autocast,
                    positions(),
                )
                result = self._leaf_runs.run(
                    target, name, call, args, kwargs, (node_args, node_kwargs), settings
                )
            elif target in STAND_INS:
                result = STAND_INS[target](*args, **kwargs)
            else:
                result = call()
        except DATA_DEPENDENT as error:
            result = self._decide(Question(target, node_args, node_kwargs, where), error)
            if not tensors_in(result):
                return result
        outputs = list(tensor_paths(result))
        if kind is NodeKind.CALL and not inputs:
            node_kwargs |= _default_device(outputs, kwargs)
        changed = [
            tensor
            for tensor, version in zip(tensors, versions, strict=True)
            if version_of(tensor) != version
        ]
        if kind is NodeKind.CALL and not outputs and not changed:
            return result
        draw = None
        if kind is NodeKind.CALL and self._meter.random_draws > draws:
            draw = self._calls.current.next_draw(target)
        node = self._values.node(
            kind,
            target,
            name,
            args=node_args,
            kwargs=node_kwargs,
            grad_enabled=grad_enabled,
            autocast=autocast,
            switches=switches,
            draw=draw,
            flops=self._meter.flops - flops,
            replicated=kind is NodeKind.CALL
            and draw is None
            and all(value.replicated for value in inputs)
            and not any(tensor.requires_grad for _, tensor in outputs),
        )
        before = self._values.change(node, changed)
        if kind is NodeKind.LEAF:
            self._leaf_runs.note_escapes(node)
        made: list[tuple[torch.Tensor, Any]] = [(tensor, path) for path, tensor in outputs]
        made += [(tensor, before[id(tensor)]) for tensor in changed]
        bound: set[int] = set()
        for tensor, source in made:
            if id(tensor) not in bound:
                bound.add(id(tensor))
                self._values.bind(tensor, node, source)
        return result

    def _decide(self, question: Question, error: Exception) -> Any:
        """Answers a question about data, if that can be done before the step runs."""
        if not question.can_be_answered:
            if question.function is torch.Tensor.item and not self._state.leaf_depth:
                return self._pending(question.args[0], question.where)
            raise UnsupportedError(
                f"{question.where} makes Python depend on the value of an activation (a branch, "
                "float() or a data-dependent shape). A pipelined step is recorded before values "
                "exist: keep the decision inside one module, return the tensor (or its .item()) "
                "from the step function and look at it outside, or put that module on one "
                "partition."
            ) from error
        answer = self._decisions.answer(
            lambda: question.answer(self._real_inputs, self._random.drawing), question.where
        )
        if not self._state.leaf_depth:
            if question.concerns_random_numbers:
                self._decided_by = f"random numbers in {self._calls.where()}"
            else:
                self.graph.guards.append(question.guard(answer))
        return question.result(answer, self._mode, self._device)

    def _pending(self, value: Value, where: str) -> PendingNumber:
        """Returns what stands for the number in a tensor that is not computed yet."""
        tensor = self._values.tensor_of(value)
        detach = torch.Tensor.detach
        kept = self._record(NodeKind.CALL, detach, "detach", tensor.detach, (tensor,), {})
        number = PendingNumber(tensor=kept, where=where)
        self.pending.append(number)
        return number

    def backward(self, tensors: Any, grad_tensors: Any) -> None:
        """Notes that the user asked for the gradients of ``tensors``."""
        if isinstance(tensors, torch.Tensor):
            tensors, grad_tensors = [tensors], None if grad_tensors is None else [grad_tensors]
        starts = [None] * len(tensors) if grad_tensors is None else grad_tensors
        for tensor, start in zip(tensors, starts, strict=True):
            if start is not None:
                # The same gradient, from a scalar; recorded like the user's own code.
                tensor = (tensor * start.detach().conj()).sum().real
            if tensor.numel() != 1:
                raise RuntimeError(
                    "grad can be implicitly created only for scalar outputs; model.backward "
                    f"received a tensor of shape {tuple(tensor.shape)}."
                )
            self.graph.roots.append(self._values.of(tensor))

    def _autocast(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    # ------------------------------------------------------------------ modules

    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stands in for ``module(*args, **kwargs)`` during the run."""
        if module not in self._named:
            return call(module, *args, **kwargs)
        if self._leaves is not None and module in self._leaves and not self._state.leaf_depth:
            name = self._leaves[module].name
            measured = functools.partial(self._call, call, module)
            return self.record(NodeKind.LEAF, module, name, measured, args, kwargs)
        return self._call(call, module, *args, **kwargs)

    def _call(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        result = self._calls.call(call, module, *args, **kwargs)
        if self._state.leaf_depth:
            self._leaf_runs.note_outputs(module, result)
        return result


def _default_device(
    outputs: Sequence[tuple[Path, torch.Tensor]], kwargs: dict[str, Any]
) -> dict[str, torch.device]:
    """Returns the device of a new tensor that was not asked for: torch's default at the time.

    Replays, and evaluations past all function modes, must not depend on ``set_default_device``.
    """
    devices = {tensor.device for _, tensor in outputs if tensor.device.type != "cpu"}
    if "device" in kwargs or len(devices) != 1:
        return {}
    return {"device": devices.pop()}
