"""The model that replaces the user's: ``smp.DistributedModel``.

Source: smd_model_parallel_pytorch.rst, DistributedModel.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.pipeline.fakes import FakeModel
from smdistributed.modelparallel.torch.pipeline.recorder import Profile
from smdistributed.modelparallel.torch.placement import Placement
from smdistributed.modelparallel.torch.random_streams import RandomStreams
from smdistributed.modelparallel.torch.runtime import TorchRuntime

PARTIAL_KEY = "_smp_is_partial"


class ModuleShell(nn.Module):
    """The thin wrapper that ``model.module`` gives; unknown attributes are the user's model's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model."""
        return self.module(*args, **kwargs)


class DistributedModel(nn.Module):
    """The user's model, split over the ranks of the pipeline.

    Use it in place of the model in the rest of the script: call it and its ``backward`` inside a
    step function. The first call of a step function decides the partition, and each rank then
    keeps the parameters of its own. Collective: every process constructs it.

    Args:
        runtime: the state of the library in this process.
        module: the model to distribute, on the CPU.
        overlapping_allreduce: accepted; gradients are reduced at the end of the step.
        backward_passes_per_step: step calls whose gradients are summed before they are reduced.
        average_grads_across_microbatches: divide summed gradients by the number of microbatches
            (the loss is a mean over the batch); False only sums.
        broadcast_buffers: with ddp, buffers follow the first rank of the DP_GROUP at each step.

    Raises:
        TypeError: ``module`` is no ``torch.nn.Module``.
        UnsupportedError: ``module`` contains TorchScript.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        module: nn.Module,
        *,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedModel takes a torch.nn.Module; received {type(module).__name__}."
            )
        super().__init__()
        self.module = ModuleShell(module)
        self._runtime = runtime
        self._backward_passes_per_step = backward_passes_per_step
        self._average_over_microbatches = average_grads_across_microbatches
        self._broadcast_buffers = broadcast_buffers
        self._passes = 0
        self._placement: Placement | None = None
        self._post_partition_hooks: dict[int, Callable[..., Any]] = {}
        self._deferred: list[Callable[[], Any]] = []
        self._fixed: dict[str, int] = {}
        self.fakes = FakeModel(module, runtime.fake_mode, runtime.device)
        self.random_streams: RandomStreams | None = None
        runtime.models.append(weakref.ref(self))
        if runtime.topology.pp_size == 1:
            module.to(runtime.device)
            self._broadcast_from_first_replica()

    # ------------------------------------------------------------------ the user's calls

    def get_module(self) -> nn.Module:
        """Returns the user's own model."""
        return self.fakes.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; with more than one partition, only inside a step function.

        Raises:
            SMPError: called outside a step function with more than one partition.
        """
        if self._runtime.topology.pp_size > 1 and self._runtime.current_step is None:
            raise SMPError(
                "with more than one partition the model can only be called inside a function "
                "decorated with @smp.step."
            )
        return self.get_module()(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Computes gradients over all partitions; takes the place of ``tensor.backward()``.

        Call it inside the step function. Gradients are final when the step function has returned.

        Args:
            tensors: the tensor, or tensors, to differentiate; usually the loss.
            grad_tensors: as in ``torch.autograd.backward``.

        Raises:
            SMPError: called outside a step function with more than one partition.
        """
        step = self._runtime.current_step
        if step is not None:
            step.backward(self, tensors, grad_tensors)
        elif self._runtime.topology.pp_size > 1:
            raise SMPError(
                "with more than one partition model.backward can only be called inside a function "
                "decorated with @smp.step."
            )
        else:
            torch.autograd.backward(tensors, grad_tensors)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a function to run once, after partitioning, in the first step call.

        It is called as ``hook(model, optimizer)`` if it takes two arguments, else as ``hook()``.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable; received {type(hook).__name__}.")
        if self.partitioned:
            warnings.warn(
                "the model is partitioned already; this post-partition hook will not run.",
                stacklevel=2,
            )
        handle = RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        return handle

    # ------------------------------------------------------------------ partition

    @property
    def partitioned(self) -> bool:
        """Whether the partition is decided: after the first step call, or at once with one."""
        return self._placement is not None or self._runtime.topology.pp_size == 1

    @property
    def placement(self) -> Placement:
        """Where every module is."""
        if self._placement is None:
            raise SMPError(
                "the model is not partitioned yet: that happens in the first call of a step "
                "function."
            )
        return self._placement

    def fix_partition(self, partition: Mapping[str, int]) -> None:
        """Decides the partition of modules by name, as a checkpoint has it.

        Raises:
            SMPError: the model is partitioned already, otherwise.
        """
        if self._placement is not None and partition != self.partition_by_name():
            raise SMPError(
                "the checkpoint has another partition than the model, which is partitioned "
                "already: resume before the first call of a step function."
            )
        self._fixed = dict(partition)

    @property
    def fixed_partition(self) -> dict[nn.Module, int]:
        """The modules whose partition a checkpoint decides."""
        return {
            module: self._fixed[name]
            for module, name in self.fakes.names.items()
            if name in self._fixed
        }

    def partition_by_name(self) -> dict[str, int]:
        """Returns the partition of every module of the chosen granularity, by name."""
        if self._placement is None:
            return {}
        assignment = self._placement.assignment
        return {**assignment.containers, **assignment.units}

    def when_partitioned(self, action: Callable[[], Any]) -> None:
        """Runs ``action`` now if the model is partitioned, else right after that."""
        if self.partitioned:
            action()
        else:
            self._deferred.append(action)

    def measure(self, profile: Profile) -> None:
        """Takes from a profile what the model needs besides its partition. Called by the step."""
        if self.random_streams is None:
            drawing = {
                self.fakes.names[module]: module
                for module, costs in profile.modules.items()
                if costs.draws_random and module in self.fakes.names
            }
            self.random_streams = RandomStreams(drawing, self._runtime.device)

    def place(self, placement: Placement) -> None:
        """Keeps the tensors of the own partition, on the device, and frees the others'.

        Called by the first step, on every process.
        """
        own, device = self._runtime.coordinates.pp_rank, self._runtime.device
        for slot in self.fakes.slots:
            module, name = slot
            tensors: Any = module._parameters if name in module._parameters else module._buffers
            tensor = tensors[name]
            if placement.owner_of(slot) == own or placement.is_everywhere(slot):
                tensor.data = tensor.data.to(device)
            else:
                # Meta data cannot be assigned to a parameter that lives on a device.
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)
        self._placement = placement
        self._broadcast_from_first_replica()
        deferred, self._deferred = self._deferred, []
        for load in deferred:
            load()
        self._run_hooks()

    def _run_hooks(self) -> None:
        optimizers = [each for each in self._runtime.live_optimizers() if each.serves(self)]
        for hook in list(self._post_partition_hooks.values()):
            takes = len(inspect.signature(hook).parameters)
            hook(self, optimizers[0] if optimizers else None) if takes >= 2 else hook()

    def _broadcast_from_first_replica(self) -> None:
        """Gives all data-parallel ranks the tensors of the first. Collective: DP_GROUP."""
        self._each_from_first_replica([*self.local_parameters(), *self.local_buffers()])

    def _each_from_first_replica(self, tensors: list[torch.Tensor]) -> None:
        runtime = self._runtime
        members = runtime.topology.members(CommGroup.DP_GROUP, runtime.rank)
        if len(members) == 1:
            return
        for tensor in tensors:
            dist.broadcast(
                tensor.data, members[0], group=runtime.process_groups[CommGroup.DP_GROUP]
            )

    # ------------------------------------------------------------------ what is here

    def _is_local(self, slot: tuple[nn.Module, str]) -> bool:
        if self._runtime.topology.pp_size == 1:
            return True
        placement = self.placement
        return placement.owner_of(
            slot
        ) == self._runtime.coordinates.pp_rank or placement.is_everywhere(slot)

    def _local(self, kind: Literal["_parameters", "_buffers"]) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for slot in self.fakes.slots:
            module, name = slot
            tensors = getattr(module, kind)
            tensor = tensors.get(name)
            if tensor is not None and id(tensor) not in seen and self._is_local(slot):
                seen.add(id(tensor))
                yield self.fakes.slot_name(slot), tensor

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of the modules on this rank; names of the whole model."""
        return self._local("_parameters")

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of the modules on this rank; there may be none."""
        return (tensor for _, tensor in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and buffer of the modules on this rank."""
        return self._local("_buffers")

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Yields the buffers of the modules on this rank."""
        return (tensor for _, tensor in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields name and module of the modules on this rank."""
        single = self._runtime.topology.pp_size == 1
        own = self._runtime.coordinates.pp_rank
        for module, name in self.fakes.names.items():
            if single or self.placement.partition_of.get(module) == own:
                yield name, module

    def local_modules(self) -> Iterator[nn.Module]:
        """Yields the modules on this rank."""
        return (module for _, module in self.local_named_modules())

    # ------------------------------------------------------------------ state

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the parameters and buffers of this rank, and whether that is only a part.

        Raises:
            SMPError: the model is not partitioned yet.
        """
        state: dict[str, Any] = {
            name: value
            for name, value in self.get_module().state_dict().items()
            if self._runtime.topology.pp_size == 1 or self._name_is_local(name)
        }
        state[PARTIAL_KEY] = self._runtime.topology.pp_size > 1
        return state

    def _name_is_local(self, name: str) -> bool:
        slot = self._slot_by_name.get(name)
        return slot is not None and self._is_local(slot)

    @property
    def _slot_by_name(self) -> dict[str, tuple[nn.Module, str]]:
        return {self.fakes.slot_name(slot): slot for slot in self.fakes.slots}

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """Returns the state of the whole model, in the form of the unpartitioned one.

        Collective: every rank of the PP_GROUP.

        Args:
            args: passed to ``torch.nn.Module.state_dict``.
            gather_to_rank0: give the others an empty dict.
            kwargs: passed to ``torch.nn.Module.state_dict``.
        """
        if self._runtime.topology.pp_size == 1 or not self.partitioned:
            return self.get_module().state_dict(*args, **kwargs)
        local = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.local_state_dict().items()
        }
        parts = self._runtime.communicator.allgather(local, CommGroup.PP_GROUP)
        if gather_to_rank0 and self._runtime.rank != 0:
            return {}
        return self._merge(parts)

    def _merge(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        merged = {name: value for part in parts for name, value in part.items()}
        return {name: merged[name] for name in self.get_module().state_dict() if name in merged}

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
    ) -> Any:
        """Loads a full or partial state; before partitioning, a partial one is kept for it.

        Collective for a partial state: every rank of the PP_GROUP.

        Args:
            state_dict: from ``state_dict``, ``local_state_dict`` or the unpartitioned model.
            strict: as in ``torch.nn.Module.load_state_dict``.
            same_partition_load: a partial state was saved under the same partition; skips the
                exchange.

        Raises:
            RuntimeError: torch's own, about missing or unexpected keys.
        """
        state = dict(state_dict)
        is_partial = bool(state.pop(PARTIAL_KEY, False))
        if is_partial and same_partition_load:
            self.when_partitioned(lambda: self._load_local(state, strict))
            return None
        if is_partial:
            parts = self._runtime.communicator.allgather(state, CommGroup.PP_GROUP)
            state = self._merge(parts)
        if not self.partitioned or self._runtime.topology.pp_size == 1:
            return self.get_module().load_state_dict(state, strict=strict)
        known = set(self.get_module().state_dict())
        missing, unexpected = sorted(known - set(state)), sorted(set(state) - known)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state does not fit the model: missing keys {missing}, unexpected keys "
                f"{unexpected}."
            )
        return self._load_local(
            {name: value for name, value in state.items() if self._name_is_local(name)}, strict
        )

    def _load_local(self, state: Mapping[str, Any], strict: bool) -> None:
        expected = {name for name in self.get_module().state_dict() if self._name_is_local(name)}
        given = set(state)
        if strict and expected != given:
            raise RuntimeError(
                "the state was saved under another partition: this rank lacks "
                f"{sorted(expected - given)} and received {sorted(given - expected)}."
            )
        with torch.no_grad():
            for name in sorted(expected & given):
                module, slot = self._slot_by_name[name]
                getattr(module, slot).copy_(state[name])

    # ------------------------------------------------------------------ gradients

    @property
    def gradient_scale(self) -> Literal["mean", "sum"]:
        """How the gradients of microbatches combine."""
        return "mean" if self._average_over_microbatches else "sum"

    def sync_buffers(self) -> None:
        """Gives all data-parallel ranks the buffers of the first. Collective: DP_GROUP."""
        if self._broadcast_buffers and self._runtime.config.ddp:
            self._each_from_first_replica(list(self.local_buffers()))

    def reduce_gradients(self) -> None:
        """Averages gradients over the data-parallel ranks. Collective: DP_GROUP.

        Called after each step with a backward pass; acts at every ``backward_passes_per_step``-th.
        """
        runtime = self._runtime
        size = runtime.topology.dp_size
        if not runtime.config.ddp or size == 1:
            return
        self._passes = (self._passes + 1) % self._backward_passes_per_step
        if self._passes:
            return
        group = runtime.process_groups[CommGroup.DP_GROUP]
        gradients: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self.local_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.setdefault(parameter.dtype, []).append(parameter.grad)
        for tensors in gradients.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, group=group)
            flat /= size
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
                tensor.copy_(part.view_as(tensor))


def refuse_unsupported(**asked: object) -> None:
    """Raises for documented arguments whose feature this version does not have yet."""
    for name, value in asked.items():
        if value:
            raise UnsupportedError(
                f"DistributedModel({name}={value!r}) is not supported yet; leave it at its default."
            )
