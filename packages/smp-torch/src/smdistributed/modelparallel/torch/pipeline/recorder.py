"""The recorder: watches the user's code run on fakes and writes down what it does."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.pipeline.fakes import FakeModel
from smdistributed.modelparallel.torch.pipeline.interception import intercepted
from smdistributed.modelparallel.torch.pipeline.ir import Graph, Guard, Node, NodeKind, Value
from smdistributed.modelparallel.torch.pipeline.replicated import evaluate_replicated
from smdistributed.modelparallel.torch.pipeline.structure import (
    map_tensors,
    placeholders,
    template,
    tensor_paths,
    tensors_in,
)

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


@dataclass
class ModuleProfile:
    """What one module costs for one microbatch, its children included.

    Attributes:
        order: position of its first call among all modules.
        flops: floating-point operations of the forward pass, as counted by PyTorch.
        activation_bytes: bytes of all tensors that its forward pass makes.
        output_bytes: bytes of the tensors that it returns.
        draws_random: its own forward, not a child's, draws random numbers.
    """

    order: int
    flops: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0
    draws_random: bool = False


@dataclass
class Profile:
    """Costs of the modules that the step function called; uncalled ones are absent."""

    modules: dict[nn.Module, ModuleProfile] = field(default_factory=dict)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what reaches the dispatcher: operations, bytes, random draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.bytes = 0
        self.random_draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random_draws += 1
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        if isinstance(out, torch.Tensor):
            self.bytes += out.numel() * out.element_size()
        return out


@dataclass
class _Frame:
    """A module call in progress."""

    module: nn.Module
    child_draws: int = 0


class Recorder(TorchFunctionMode):
    """Sees every torch function and every module call while the user's code runs on fakes."""

    def __init__(
        self,
        models: Sequence[FakeModel],
        mode: FakeTensorMode,
        device: torch.device,
        leaves: Mapping[nn.Module, str] | None,
    ) -> None:
        super().__init__()
        self.graph = Graph()
        self.profile = Profile()
        self._models = models
        self._mode = mode
        self._device = device
        self._leaves = leaves
        self._names = {module: name for model in models for module, name in model.names.items()}
        self._meter = _Meter()
        self._paused = 0
        self._leaf_depth = 0
        self._stack: list[_Frame] = []
        self._real_inputs: list[torch.Tensor] = []
        self._values: dict[int, Value] = {}
        self._sharing: dict[int, list[Value]] = collections.defaultdict(list)
        # Identities above are only good while the tensors live.
        self._alive: list[torch.Tensor] = []
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
                result = function(*args, **kwargs)
            self._paused += 1  # what follows belongs to us
        return result

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self._mode.from_tensor(tensor)
        position = len(self._real_inputs)
        self._real_inputs.append(tensor)
        node = self._node(NodeKind.INPUT, position, f"input {position}", replicated=True)
        self._bind(fake, node, ())
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

    # ------------------------------------------------------------------ values

    def _node(self, kind: NodeKind, target: Any, name: str, **state: Any) -> Node:
        return self.graph.add(Node(len(self.graph.nodes), kind, target, name, **state))

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
                if self._leaves is None or self._leaf_depth:
                    return self._bind(tensor, self._node(NodeKind.CALL, None, "unknown"), ())
                raise UnsupportedError(
                    f"a tensor of shape {tuple(tensor.shape)} appeared that no recorded call "
                    f"made, in {self._where()}: a hook, an attribute or a compiled function "
                    "carried it out of a module that is executed as a whole. Return it from that "
                    "module's forward, or put the modules that use it on one partition."
                )
            constant = tensor.constant
        node = self._node(NodeKind.CONSTANT, constant, "constant", replicated=True)
        return self._bind(tensor, node, ())

    def template(self, obj: Any, where: str) -> Any:
        """Returns ``obj`` with its tensors replaced by values."""
        return template(obj, self.value, where)

    def _where(self) -> str:
        if not self._stack:
            return "the step function"
        return self._names[self._stack[-1].module] or "the model's own forward"

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
        try:
            return self._record(kind, target, name, call, args, kwargs)
        finally:
            self._paused -= 1

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
        flops, draws = self._meter.flops, self._meter.random_draws
        try:
            with self._inside_leaf() if kind is NodeKind.LEAF else contextlib.nullcontext():
                result = call()
        except _DATA_DEPENDENT as error:
            return self._decide(target, node_args, node_kwargs, where, error)
        outputs = list(tensor_paths(result))
        changed = [
            tensor
            for tensor, version in zip(tensors, versions, strict=True)
            if _version(tensor) != version
        ]
        if kind is NodeKind.CALL and not outputs and not changed:
            return result
        draws_random = self._meter.random_draws > draws
        node = self._node(
            kind,
            target,
            name,
            args=node_args,
            kwargs=node_kwargs,
            grad_enabled=grad_enabled,
            autocast=autocast,
            random=draws_random,
            flops=self._meter.flops - flops,
            replicated=kind is NodeKind.CALL
            and not draws_random
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
            old.replaced_by = node
            node.changes.append(old)
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

    @contextlib.contextmanager
    def _inside_leaf(self) -> Iterator[None]:
        """Records what happens inside a leaf aside, and forgets it.

        A leaf runs for real in every replay; the record serves only to answer questions about data
        while it runs on fakes.
        """
        graph, known, paused = self.graph, self._values, self._paused
        self.graph, self._values, self._paused = Graph(), dict(known), 0
        self._leaf_depth += 1
        try:
            yield
        finally:
            self._leaf_depth -= 1
            self.graph, self._values, self._paused = graph, known, paused

    def _decide(self, function: Any, args: Any, kwargs: Any, where: str, error: Exception) -> Any:
        """Answers a question about data: for real if it concerns step inputs only."""
        values = list(placeholders((args, kwargs), Value))
        if not all(value.replicated for value in values):
            raise UnsupportedError(
                f"{where} makes Python depend on the value of an activation (a branch, .item(), "
                "float() or a data-dependent shape). A pipelined step is recorded before values "
                "exist: keep the decision inside one module, return the tensor from the step "
                "function and look at it outside, or put that module on one partition."
            ) from error
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            answer = evaluate_replicated(function, args, kwargs, self._real_inputs)
        if any(True for _ in tensor_paths(answer)):
            raise UnsupportedError(
                f"{where} makes a tensor whose shape depends on data; compute it before the step "
                "and pass it in."
            ) from error
        if not self._leaf_depth:
            self.graph.guards.append(Guard(where, function, args, kwargs, answer))
        return answer

    def backward(self, tensors: Any, grad_tensors: Any) -> None:
        """Notes that the user asked for the gradients of ``tensors``."""
        if grad_tensors is not None:
            raise UnsupportedError(
                "model.backward(..., grad_tensors=...) is not supported with more than one "
                "partition yet: call it on (tensor * grad_tensor).sum()."
            )
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
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
            name = self._leaves[module]
            return self.record(
                NodeKind.LEAF, module, name, lambda: call(module, *args, **kwargs), args, kwargs
            )
        frame = _Frame(module)
        self._stack.append(frame)
        meter = self._meter
        flops, num_bytes, draws = meter.flops, meter.bytes, meter.random_draws
        costs = self.profile.modules.setdefault(
            module, ModuleProfile(order=len(self.profile.modules))
        )
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._stack.pop()
        drawn = meter.random_draws - draws
        if self._stack:
            self._stack[-1].child_draws += drawn
        costs.draws_random |= drawn > frame.child_draws
        costs.flops += meter.flops - flops
        costs.activation_bytes += meter.bytes - num_bytes
        costs.output_bytes += sum(
            tensor.numel() * tensor.element_size() for _, tensor in tensor_paths(result)
        )
        return result


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
