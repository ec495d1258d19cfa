"""The recorder: watches the user's code run on fakes and writes down what it does."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.carried import Carried, CarriedObjects
from smdistributed.modelparallel.torch.record.costs import Draws, Meter, ModuleProfile, Profile
from smdistributed.modelparallel.torch.record.decisions import Decisions
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.record.interception import intercepted
from smdistributed.modelparallel.torch.record.ir import Graph, Leaf, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.leaf_memory import LeafMemory
from smdistributed.modelparallel.torch.record.nested import (
    Path,
    fill,
    map_tensors,
    opaque_objects,
    placeholders,
    template,
    tensor_paths,
    tensors_in,
)
from smdistributed.modelparallel.torch.record.pending import PendingNumber
from smdistributed.modelparallel.torch.record.python_state import StateWatch, python_draws
from smdistributed.modelparallel.torch.record.questions import Question
from smdistributed.modelparallel.torch.record.real_run import run_on_random_numbers
from smdistributed.modelparallel.torch.record.replicated import evaluate_replicated, sources
from smdistributed.modelparallel.torch.record.stand_ins import STAND_INS
from smdistributed.modelparallel.torch.record.switches import changes_since, positions
from smdistributed.modelparallel.torch.record.taps import Tap, attribute_taps

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

#: Questions about a tensor that leave no trace in a computation.
_UNRECORDED = {
    torch._C._set_grad_enabled,
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


#: Stands for the step function itself where the keys of random numbers have a module's name.
STEP_FUNCTION = "step"


class Randomness(Protocol):
    """The random numbers of the step."""

    def drawing(self, name: str, call: int, draw: int) -> contextlib.AbstractContextManager[None]:
        """Seeds PyTorch's generators for one draw, and puts them back."""

    def draws_in_python(self, module: nn.Module) -> bool:
        """Whether the own forward of a module is known to draw from Python's generators."""


@dataclass
class _Frame:
    """A call of a module in progress, or of the step function.

    Attributes:
        module: None for the step function.
        name: in the keys of random numbers.
        call: the number of the call.
        draws: recorded draws of its own so far.
        functions: that drew.
        child_draws: draws of its children.
        child_python: a child drew from Python's generators.
    """

    module: nn.Module | None
    name: str
    call: int = 0
    draws: int = 0
    functions: set[Any] = field(default_factory=set)
    child_draws: int = 0
    child_python: bool = False


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
        self.graph = Graph()
        self.profile = Profile()
        self._models = models
        self._mode = mode
        self._device = device
        self._leaves = leaves
        self._decisions = decisions
        self._random = random
        self._memory = memory
        self._names = {module: name for model in models for module, name in model.names.items()}
        self._meter = Meter()
        self._switches = positions()
        self._paused = 0
        self._region: int | None = None
        self._num_regions = 0
        self._leaf_depth = 0
        self._stack = [_Frame(None, STEP_FUNCTION)]
        self._calls: collections.Counter[str] = collections.Counter()
        self._draw_names = {
            module: model.draw_name(module) for model in models for module in model.names
        }
        #: The random numbers that a decision was made from, or a split module drew in Python.
        self.decided_by: str | None = None
        #: The numbers that were taken from activations.
        self.pending: list[PendingNumber] = []
        self._real_inputs: list[torch.Tensor] = []
        self._values: dict[int, Value] = {}
        self._sharing: dict[int, list[Value]] = collections.defaultdict(list)
        # Identities above are only good while the tensors live.
        self._alive: list[torch.Tensor] = []
        split = [module for module in self._names if leaves is None or module not in leaves]
        #: The state that glue read; then that which each leaf read.
        self.watch = StateWatch(whole=split)
        self.leaf_watches: list[StateWatch] = []
        self._active_watch = self.watch
        self._new_leaf_watches: list[StateWatch] = []
        self._changed_by_leaves: dict[tuple[int, Any], tuple[str, Any]] = {}
        self._roots = {model.model for model in models}
        self._runs_for_real = False
        self._inner_calls: collections.Counter[nn.Module] = collections.Counter()
        self._inner_outputs: dict[int, tuple[Tap, torch.Tensor]] = {}
        #: Fakes that a leaf made and did not return -> where a replay finds them.
        self._escaped: dict[int, tuple[Node, Tap, torch.Tensor]] = {}
        self._carried: dict[int, tuple[Carried, Any]] = {}
        self._copies: collections.defaultdict[int, CarriedObjects] = collections.defaultdict(
            lambda: CarriedObjects(Carried.stand_in)
        )
        self._fakes = [fake for model in models for fake in model.slots.values()]
        self._slots = {
            id(fake): (model, slot) for model in models for slot, fake in model.slots.items()
        }

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
                    for watch in reversed(self._new_leaf_watches):
                        watch.restore()
            self._check_shared_state()
            self._paused += 1  # what follows belongs to us
            frame = self._stack[0]
            self.profile.step_draws = Draws(frame.draws, frozenset(frame.functions))
        return result

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
        position = len(self._real_inputs)
        self._real_inputs.append(tensor)
        node = self._node(NodeKind.INPUT, position, f"input {position}", replicated=True)
        self._bind(fake, node, ())
        return fake

    def _check_shared_state(self) -> None:
        """Raises if glue reads or sets state that leaves change: microbatches would mix it up.

        In one process the glue of a microbatch comes after the leaves of the one before.
        """
        for entry, (name, now) in self._changed_by_leaves.items():
            if self.watch.minds(entry, now):
                raise UnsupportedError(
                    f"{name} is changed by the module that has it, and read or set by code outside "
                    "it, in the forward of a module that is split over partitions or in the step "
                    "function. Put these modules on one partition, or keep that state inside one "
                    "module (for a cache of Transformers: use_cache=False)."
                )

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

    # ------------------------------------------------------------------ values

    def _node(self, kind: NodeKind, target: Any, name: str, **state: Any) -> Node:
        return self.graph.add(
            Node(len(self.graph.nodes), kind, target, name, region=self._region, **state)
        )

    @contextlib.contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Gives what is recorded inside a region of its own; the outermost one counts."""
        if self._region is not None:
            yield
            return
        self._region = self._num_regions
        self._num_regions += 1
        try:
            yield
        finally:
            self._region = None

    def _bind(self, tensor: torch.Tensor, node: Node, source: Any) -> Value:
        value = self.graph.bind(tensor, node, source)
        self._values[id(tensor)] = value
        self._alive.append(tensor)
        self._sharing[tensor.untyped_storage()._cdata].append(value)
        return value

    def value(self, tensor: torch.Tensor) -> Value:
        """Returns the value that a tensor of the run stands for."""
        known = self._values.get(id(tensor))
        if known is not None:
            return known
        if id(tensor) in self._slots:
            model, slot = self._slots[id(tensor)]
            # A parameter lives on one rank; buffers are everywhere.
            node = self._node(
                NodeKind.ATTRIBUTE,
                slot,
                model.slot_name(slot),
                replicated=not isinstance(tensor, nn.Parameter),
            )
            return self._bind(tensor, node, ())
        constant = tensor
        if isinstance(tensor, FakeTensor):
            if tensor.constant is None:
                escaped = self._escaped.get(id(tensor))
                if escaped is not None and not self._leaf_depth:
                    node, tap, _ = escaped
                    if self._memory is not None:
                        self._memory.forget(node.target)
                    node.taps.append(tap)
                    return self._bind(tensor, node, tap)
                if self._leaves is None or self._leaf_depth:
                    return self._bind(tensor, self._node(NodeKind.CALL, None, "unknown"), ())
                raise UnsupportedError(
                    f"a tensor of shape {tuple(tensor.shape)} appeared that no recorded call "
                    f"made, in {self._where()}: a hook, an attribute or a compiled function "
                    "carried it out of a module that is executed as a whole. Return it from that "
                    "module's forward, or put the modules that use it on one partition."
                )
            constant = tensor.constant
        name = _constant_text(constant)
        node = self._node(NodeKind.CONSTANT, constant, name, replicated=True)
        return self._bind(tensor, node, ())

    def template(self, obj: Any, where: str) -> Any:
        """Returns ``obj`` with its tensors replaced by values, and other state by stand-ins."""

        def carry(obj: Any) -> Any:
            if self._leaves is None or self._leaf_depth:
                return obj
            if id(obj) not in self._carried:
                carried = Carried(len(self._carried), obj, self.constant, where)
                self._carried[id(obj)] = carried, obj
            return self._carried[id(obj)][0]

        return template(obj, self.value, carry)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for one that is the same in every microbatch; else None."""
        value = self.value(tensor)
        if not value.replicated or any(node.kind is NodeKind.INPUT for node in sources([value])):
            return None
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            real: torch.Tensor = evaluate_replicated(lambda tensor: tensor, (value,), {}, ())
        return real

    def _where(self) -> str:
        module = self._stack[-1].module
        if module is None:
            return "the step function"
        return self._names[module] or "the model's own forward"

    # ------------------------------------------------------------------ recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or func in _UNRECORDED:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            if self._leaves is None:
                return None  # costs of forward passes only
            raise UnsupportedError(
                "with more than one partition, tensor.backward() cannot reach the other "
                "partitions: call model.backward(tensor) on the DistributedModel instead."
            )
        if isinstance(func, torch._ops.OpOverload):
            if self._leaves is not None and not self._leaf_depth and "lift_fresh" not in str(func):
                raise UnsupportedError(
                    f"{func} was called from {self._where()} past PyTorch's function "
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
        if self._paused:
            return call()
        self._paused += 1
        StateWatch.pause()
        try:
            return self._record(kind, target, name, call, args, kwargs)
        finally:
            self._paused -= 1
            self._active_watch.resume()

    def _record(
        self,
        kind: NodeKind,
        target: Any,
        name: str,
        call: Callable[[], Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        where = f"{name} in {self._where()}"
        node_args = self.template(tuple(args), where)
        node_kwargs = self.template(dict(kwargs), where)
        inputs = list(placeholders((node_args, node_kwargs), Value))
        tensors = tensors_in((args, kwargs))
        versions = [_version(tensor) for tensor in tensors]
        grad_enabled, autocast = torch.is_grad_enabled(), self._autocast()
        switches = changes_since(self._switches)
        flops, draws = self._meter.flops, self._meter.random_draws
        try:
            if kind is NodeKind.LEAF:
                result = self._leaf(target, name, call, args, kwargs, (node_args, node_kwargs))
            elif target in STAND_INS:
                result = STAND_INS[target](*args, **kwargs)
            else:
                result = call()
        except _DATA_DEPENDENT as error:
            result = self._decide(Question(target, node_args, node_kwargs, where), error)
            if not tensors_in(result):
                return result
        outputs = list(tensor_paths(result))
        if kind is NodeKind.CALL and not inputs:
            node_kwargs |= _default_device(outputs, kwargs)
        changed = [
            tensor
            for tensor, version in zip(tensors, versions, strict=True)
            if _version(tensor) != version
        ]
        if kind is NodeKind.CALL and not outputs and not changed:
            return result
        draw = None
        if kind is NodeKind.CALL and self._meter.random_draws > draws:
            frame = self._stack[-1]
            draw = (frame.name, frame.call, frame.draws)
            frame.draws += 1
            frame.functions.add(target)
        node = self._node(
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
        before = {id(tensor): self._values[id(tensor)] for tensor in changed}
        for tensor in {id(tensor): tensor for tensor in changed}.values():
            old = before[id(tensor)]
            node.aliases += [
                value
                for value in self._sharing[tensor.untyped_storage()._cdata]
                if value is not old
            ]
            node.changes.append(old)
            for value in (old, *node.aliases):
                value.is_changed = True
        if kind is NodeKind.LEAF:
            self._note_escapes(node)
        bound: set[int] = set()
        for path, tensor in outputs:
            if id(tensor) not in bound:
                bound.add(id(tensor))
                self._bind(tensor, node, path)
        for tensor in changed:
            if id(tensor) not in bound:
                bound.add(id(tensor))
                self._bind(tensor, node, before[id(tensor)])
        return result

    def _leaf(
        self,
        module: nn.Module,
        name: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        templates: Any,
    ) -> Any:
        """Runs a leaf on fakes, or remembers what it returned; leaves no trace in the module."""
        carries = any(True for _ in placeholders(templates, Carried))
        memory = None if carries or self._is_observed(module) else self._memory
        if memory is None:
            if not carries:
                return self._run_leaf(module, lambda: call(*args, **kwargs))[0]
            alike = self._run_on_copies(module, call, args, kwargs)
            result, lines, _ = self._run_leaf(module, lambda: call(*args, **kwargs))
            if lines != alike:
                kinds = {type(each.pristine).__name__ for each in placeholders(templates, Carried)}
                raise UnsupportedError(
                    f"{name} depends on what modules of another partition left in an object of "
                    f"class {', '.join(sorted(kinds))}. Put the modules that share it on one "
                    "partition (for a key-value cache of Transformers: or use_cache=False)."
                )
            return result
        meter = self._meter
        state = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            self._autocast(),
            positions(),
        )
        arguments = memory.key(args, kwargs)
        known = memory.find(module, arguments, state)
        if known is not None:
            self.leaf_watches.append(known.watch)
            meter.flops += known.flops
            meter.random_draws += known.draws
            self._stack[-1].child_draws += known.draws
            return memory.result(known, self._mode)
        flops, draws = meter.flops, meter.random_draws
        tensors = tensors_in((args, kwargs))
        versions = [_version(tensor) for tensor in tensors]
        result, _, watch = self._run_leaf(module, lambda: call(*args, **kwargs))
        storages = {tensor.untyped_storage()._cdata for tensor in (*tensors, *self._fakes)}
        if (
            watch.changed() is None
            and versions == [_version(tensor) for tensor in tensors]
            and not any(
                tensor.untyped_storage()._cdata in storages for _, tensor in tensor_paths(result)
            )
        ):
            memory.add(
                module,
                arguments,
                state,
                result,
                watch,
                meter.flops - flops,
                meter.random_draws - draws,
            )
        return result

    def _is_observed(self, leaf: nn.Module) -> bool:
        """Whether hooks see the calls of a leaf, or of modules in it: they must not be left out."""
        return any(
            hook.__module__ != self._random.__module__
            for module in leaf.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )

    def _run_leaf(
        self, module: nn.Module, call: Callable[[], Any]
    ) -> tuple[Any, list[str], StateWatch]:
        """Runs a leaf on fakes; returns its result, what it did, and the state that it read."""
        self._inner_calls.clear()
        self._inner_outputs.clear()
        watch = StateWatch(whole=())
        for inner in module.modules():
            # A module may register hooks when it is called first.
            watch.keep(inner._forward_hooks, f"the hooks of {type(inner).__name__}")
        watch.begin(type(module).forward, module)
        try:
            with self._inside_leaf(watch) as graph:
                result = call()
        finally:
            watch.end()
            self._changed_by_leaves |= watch.changed_entries()
            watch.restore_random()
            self.leaf_watches.append(watch)
            self._new_leaf_watches.append(watch)
        return result, [node.line(repr) for node in graph.nodes], watch

    def _run_on_copies(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> list[str]:
        """Returns what a leaf does with its rank's copies of the objects that it is given.

        Leaves no trace but in the copies.
        """
        assert self._leaves is not None
        copies = self._copies[self._leaves[module].partition]
        own = template((args, kwargs), lambda tensor: tensor, lambda obj: self._carried[id(obj)][0])
        args, kwargs = fill(own, Carried, copies)
        calls, kept, meter = self._calls.copy(), dict(self._inner_outputs), self._meter.reading()
        with _without_hooks(module):
            _, lines, watch = self._run_leaf(module, lambda: call(*args, **kwargs))
        watch.restore()
        self._calls, self._inner_outputs = calls, kept
        self._meter.put_back(meter)
        return lines

    @contextlib.contextmanager
    def _inside_leaf(self, watch: StateWatch) -> Iterator[Graph]:
        """Records what happens inside a leaf aside, and forgets it.

        A leaf runs for real in every replay; the record serves only to answer questions about data
        while it runs on fakes.
        """
        graph, known, paused, outer = self.graph, self._values, self._paused, self._active_watch
        self.graph, self._values, self._paused = Graph(), dict(known), 0
        self._active_watch = watch
        self._leaf_depth += 1
        try:
            yield self.graph
        finally:
            self._leaf_depth -= 1
            self.graph, self._values, self._paused = graph, known, paused
            self._active_watch = outer

    def _note_escapes(self, node: Node) -> None:
        """Remembers where a replay finds the tensors that a leaf made besides its result."""
        for tap, tensor in self._inner_outputs.values():
            self._escaped[id(tensor)] = node, tap, tensor
        for tap, tensor in attribute_taps(node.target, self._names):
            self._escaped.setdefault(id(tensor), (node, tap, tensor))
        self._inner_outputs.clear()

    def _decide(self, question: Question, error: Exception) -> Any:
        """Answers a question about data, if that can be done before the step runs."""
        if not question.can_be_answered:
            if question.function is torch.Tensor.item and not self._leaf_depth:
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
        if not self._leaf_depth:
            if question.concerns_random_numbers:
                self.decided_by = f"random numbers in {self._where()}"
            else:
                self.graph.guards.append(question.guard(answer))
        return question.result(answer, self._mode, self._device)

    def _pending(self, value: Value, where: str) -> PendingNumber:
        """Returns what stands for the number in a tensor that is not computed yet."""
        tensor = next(tensor for tensor in self._alive if self._values.get(id(tensor)) is value)
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
            self.graph.roots.append(self.value(tensor))

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
        if module not in self._names:
            return call(module, *args, **kwargs)
        if self._leaves is not None and module in self._leaves and not self._leaf_depth:
            name = self._leaves[module].name
            return self.record(
                NodeKind.LEAF,
                module,
                name,
                functools.partial(self._measured, call, module),
                args,
                kwargs,
            )
        return self._measured(call, module, *args, **kwargs)

    def _measured(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a module and notes what it costs."""
        name = self._draw_names[module]
        frame = _Frame(module, name, self._calls[name])
        self._calls[name] += 1
        self._stack.append(frame)
        meter = self._meter
        flops, num_bytes, draws = meter.flops, meter.bytes, meter.random_draws
        costs = self.profile.modules.setdefault(
            module, ModuleProfile(order=len(self.profile.modules))
        )
        drawn_in_python = python_draws()
        try:
            result = self._called(call, module, args, kwargs, costs)
        finally:
            self._stack.pop()
        if self._leaf_depth:
            self._note_outputs(module, result)
        in_python = drawn_in_python()
        drawn = meter.random_draws - draws
        self._stack[-1].child_draws += drawn
        self._stack[-1].child_python |= in_python
        costs.draws = costs.draws.union(self._own_draws(frame, drawn, in_python))
        if not self._leaf_depth and (in_python or self._random.draws_in_python(module)):
            self.decided_by = f"Python's random numbers in {self._names[module]}"
        costs.flops += meter.flops - flops
        costs.activation_bytes += meter.bytes - num_bytes
        costs.output_bytes += sum(
            tensor.numel() * tensor.element_size() for _, tensor in tensor_paths(result)
        )
        return result

    def _called(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        costs: ModuleProfile,
    ) -> Any:
        """Calls a module on fakes; where that fails, on random numbers."""
        is_glue = self._leaves is not None and not self._leaf_depth
        if is_glue or self._runs_for_real or module in self._roots:
            return call(module, *args, **kwargs)
        try:
            return call(module, *args, **kwargs)
        except (UnsupportedError, RuntimeError, NotImplementedError) as error:
            # Only fakes fail so; what also fails for real is the user's own error.
            self._runs_for_real = True
            self._paused += 1
            try:
                result = run_on_random_numbers(call, module, args, kwargs, self._mode)
            except Exception:
                raise error from None
            finally:
                self._runs_for_real = False
                self._paused -= 1
            costs.opaque = f"{type(error).__name__}: {error}"
            return result

    def _note_outputs(self, module: nn.Module, result: Any) -> None:
        """Remembers what an inner module of a leaf returned, in case it leaves by another way."""
        number = self._inner_calls[module]
        self._inner_calls[module] += 1
        for path, tensor in tensor_paths(result):
            self._inner_outputs.setdefault(
                id(tensor), (Tap(module, number, path, self._names[module]), tensor)
            )

    @staticmethod
    def _own_draws(frame: _Frame, drawn: int, in_python: bool) -> Draws:
        # What no function mode sees, a scripted function say, counts as one draw.
        most = max(frame.draws, min(1, drawn - frame.child_draws))
        return Draws(most, frozenset(frame.functions), in_python and not frame.child_python)


@contextlib.contextmanager
def _without_hooks(leaf: nn.Module) -> Iterator[None]:
    """Keeps the hooks inside a leaf from seeing a run that the user's code did not ask for."""
    kept = []
    for module in leaf.modules():
        kept.append((module, module._forward_hooks, module._forward_pre_hooks))
        module._forward_hooks = collections.OrderedDict()
        module._forward_pre_hooks = collections.OrderedDict()
    try:
        yield
    finally:
        for module, hooks, pre_hooks in kept:
            module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks


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


def _constant_text(tensor: torch.Tensor) -> str:
    """Names a constant, so that ranks which have different ones find out."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        value = f" {tensor.tolist()}" if tensor.numel() == 1 and not tensor.is_meta else ""
        return f"constant {tuple(tensor.shape)} {tensor.dtype}{value}"


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
