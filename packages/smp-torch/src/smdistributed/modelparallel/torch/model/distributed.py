"""The model that replaces the user's: ``smp.DistributedModel``.

Source: smd_model_parallel_pytorch.rst, DistributedModel.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.common.errors import (
    NotPartitionedError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.torch.gradients.data_parallel import (
    DataParallel,
    DataParallelOptions,
)
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY, ModelState, collect
from smdistributed.modelparallel.torch.model.tensor_queries import TensorParallelQueries
from smdistributed.modelparallel.torch.plan.placement import Placement
from smdistributed.modelparallel.torch.random.modules import RandomStreams
from smdistributed.modelparallel.torch.record.costs import Profile
from smdistributed.modelparallel.torch.record.fakes import FakeModel, Slot
from smdistributed.modelparallel.torch.record.nested import map_tensors
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

_NOT_PARTITIONED = (
    "the model is not partitioned yet: that happens in the first call of a step function."
)


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


class DistributedModel(TensorParallelQueries, nn.Module):
    """The user's model, split over the ranks of the pipeline.

    Use it in place of the model in the rest of the script: call it and its ``backward`` inside a
    step function. The first call of a step function decides the partition, and each rank then
    keeps the parameters of its own. Collective: every process constructs it.

    Args:
        runtime: the state of the library in this process.
        module: the model to distribute, on the CPU.
        options: about data parallelism.

    Raises:
        TypeError: ``module`` is no ``torch.nn.Module``.
        UnsupportedError: ``module`` contains TorchScript.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        module: nn.Module,
        options: DataParallelOptions,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedModel takes a torch.nn.Module; received {type(module).__name__}."
            )
        super().__init__()
        self.module = ModuleShell(module)
        if not hasattr(module, "module"):
            # Scripts go one ``.module`` further for each wrapper that they expect. Not an
            # attribute assignment, which would make the model a submodule of itself.
            vars(module)["module"] = module
        self._runtime = runtime
        self.data_parallel = DataParallel(runtime, options)
        self._placement: Placement | None = None
        # A handle refers to its registry weakly, which a plain dict does not allow.
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._deferred: list[Callable[[], Any]] = []
        self._fixed: dict[str, int] = {}
        self.number, self.place_in_keys = runtime.add_model(self)
        self.fakes = FakeModel(module, runtime.fake_mode, runtime.device, number=self.place_in_keys)
        self.random_streams = RandomStreams(runtime.random)
        self.learn_draws()
        #: How often the structure of the user's model was taken.
        self.version = 0
        if runtime.topology.pp_size == 1:
            for _, tensor in self._delayed():
                runtime.delayed.fill(tensor, runtime.device)
            module.to(runtime.device)
            self.data_parallel.attach(self.local_named_parameters(), self.local_buffers)

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

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Lets data-parallel ranks train with different numbers of batches.

        A rank that leaves the context early takes part in the others' reductions with zeros, and
        in the end gets the parameters and buffers of a rank that had the most batches. All ranks
        of one pipeline have the same number of batches.

        Collective: every process.

        Args:
            divide_by_initial_world_size: average over all replicas; False: over those that still
                have batches.
            enable: False when the numbers are equal: nothing is done.
            throw_on_early_termination: raise on every rank once one has no more batches.

        Raises:
            RuntimeError: ``ddp`` is not True; or see ``throw_on_early_termination``.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        return self.data_parallel.join(
            divide_by_initial_world_size, enable, throw_on_early_termination
        )

    def register_comm_hook(self, state: object, callable: Callable[..., Any]) -> None:
        """Lets ``callable(state, bucket)`` reduce gradients over the data-parallel ranks.

        It gets each ``torch.distributed.GradBucket`` and returns a future of its reduced tensor,
        as with ``DistributedDataParallel``, so torch's own hooks fit; give those that take a
        process group ``smp.get_dp_process_group()``. The library averages neither over replicas
        nor over microbatches then. Call it on every process, before the first backward pass.

        Raises:
            RuntimeError: ``ddp`` or ``overlapping_allreduce`` is not True, gradients have been
                computed, or there is a hook already.
            TypeError: the hook cannot be called.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        self.data_parallel.register_comm_hook(state, callable)

    _register_comm_hook = register_comm_hook

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

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a function to run once, after the next step call with a backward pass.

        Gradients are final then and ``optimizer.step`` has not been called yet. It is called as
        ``hook(model, optimizer)`` if it takes two arguments, else as ``hook()``.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable; received {type(hook).__name__}.")
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    # ------------------------------------------------------------------ partition

    @property
    def partitioned(self) -> bool:
        """Whether the partition is decided, by the first step call; with one partition, at once."""
        return self._placement is not None or self._runtime.topology.pp_size == 1

    @property
    def placement(self) -> Placement:
        """Where every module is."""
        if self._placement is None:
            raise NotPartitionedError(_NOT_PARTITIONED)
        return self._placement

    def partition_of(self, module: nn.Module) -> int | None:
        """Returns the partition of a module of the user's model; None while it is not decided."""
        return None if self._placement is None else self._placement.partition_of[module]

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

    def check_nothing_waits(self) -> None:
        """Raises if a loaded state is not in the model yet, since it waits for the partition.

        Raises:
            NotPartitionedError: one is waiting.
        """
        if self._deferred:
            raise NotPartitionedError(
                "a state that was loaded waits for the partition of the model, which the first "
                "call of a step function decides; read the state after that call."
            )

    def refresh(self) -> None:
        """Takes the user's changes to the structure of the model: modules, parameters, ties.

        Called at the start of each step, on every process.

        Raises:
            PartitionError: a parameter is now shared between partitions.
        """
        if self.fakes.is_current:
            return
        former = self.fakes
        self.fakes = FakeModel(former.model, self._runtime.fake_mode, self._runtime.device, former)
        self.version += 1
        self.random_streams.keep(self._names_in_keys())
        if self._placement is not None:
            self._placement = Placement(self.fakes, self._placement.assignment)
            self._placement.check_ties()
            self._settle(self._placement)
        if self.partitioned:
            self.data_parallel.watch(self.local_named_parameters())

    def learn_draws(self) -> None:
        """Finds out which modules draw random numbers, each in its next call."""
        self.random_streams.learn(self._names_in_keys())

    def adopt(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        """Takes a module that code adds during a step; its draws are learned in its first call."""
        if parent in self.fakes.names:
            prefix = f"{self.fakes.draw_name(parent)}.{name}"
            self.random_streams.learn(
                {
                    f"{prefix}.{inner}".rstrip("."): module
                    for inner, module in child.named_modules()
                    if module not in self.fakes.names
                }
            )

    def _names_in_keys(self) -> dict[str, nn.Module]:
        return {self.fakes.draw_name(module): module for module in self.fakes.names}

    def measure(self, profile: Profile) -> None:
        """Takes from a profile which modules draw random numbers. Called by the step."""
        self.random_streams.add(
            {
                self.fakes.draw_name(module): (module, costs.draws)
                for module, costs in profile.modules.items()
                if module in self.fakes.names
            }
        )

    def place(self, placement: Placement) -> None:
        """Keeps the tensors of the own partition, on the device, and frees the others'.

        Called by the first step, on every process.
        """
        self._settle(placement)
        self._placement = placement
        self.data_parallel.attach(self.local_named_parameters(), self.local_buffers)
        deferred, self._deferred = self._deferred, []
        for load in deferred:
            load()
        self._run_hooks(self._post_partition_hooks)

    def run_post_step_hooks(self) -> None:
        """Runs what waits for the end of a step with a backward pass. Called by the step."""
        self._run_hooks(self._post_step_hooks)

    def _settle(self, placement: Placement) -> None:
        own, device = self._runtime.coordinates.pp_rank, self._runtime.device
        delayed = self._runtime.delayed
        for slot, tensor in self._delayed():
            if placement.is_on(own, slot):
                delayed.fill(tensor, device)
            else:
                delayed.drop(tensor, device)
        for slot in self.fakes.slots:
            module, name = slot
            tensors: Any = module._parameters if name in module._parameters else module._buffers
            tensor = tensors[name]
            if placement.is_on(own, slot):
                tensor.data = tensor.data.to(device)
            else:
                # Meta data cannot be assigned to a parameter that lives on a device.
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)

    def _delayed(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Yields what has no values yet: a tied tensor once."""
        for slot in self.fakes.slots:
            module, name = slot
            tensors: Any = module._parameters if name in module._parameters else module._buffers
            if self._runtime.delayed.holds(tensors[name]):
                yield slot, tensors[name]

    def _run_hooks(self, hooks: dict[int, Callable[..., Any]]) -> None:
        """Runs hooks in order of registration, each once."""
        if not hooks:
            return
        optimizers = [each for each in self._runtime.live_optimizers() if each.serves(self)]
        for key in list(hooks):
            hook = hooks.pop(key)
            takes = len(inspect.signature(hook).parameters)
            hook(self, optimizers[0] if optimizers else None) if takes >= 2 else hook()

    # ------------------------------------------------------------------ what is here

    def _is_local(self, slot: tuple[nn.Module, str]) -> bool:
        if self._runtime.topology.pp_size == 1:
            return True
        return self.placement.is_on(self._runtime.coordinates.pp_rank, slot)

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

    @property
    def _state(self) -> ModelState:
        return ModelState(self._runtime, self.fakes, self._placement)

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the parameters and buffers of this rank, and whether that is only a part.

        Raises:
            NotPartitionedError: the model is not partitioned yet.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        if not self.partitioned:
            raise NotPartitionedError(_NOT_PARTITIONED)
        return self._state.local()

    def state_dict(  # type: ignore[override]
        self,
        gather_to_rank0: bool = False,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Returns the state of the whole model, in the form of the unpartitioned one.

        Collective: every rank of the PP_GROUP. A rank that does not come ends the others with an
        error after ``communication_timeout``.

        Args:
            gather_to_rank0: give every process but rank 0 an empty dict.
            destination: as in ``torch.nn.Module.state_dict``.
            prefix: as in ``torch.nn.Module.state_dict``.
            keep_vars: must be False: most tensors come from other processes.

        Raises:
            NotPartitionedError: a loaded state, or delayed parameters, still wait for the
                partition.
            CommError: a rank did not take part.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        if keep_vars:
            raise UnsupportedError("state_dict(keep_vars=True) is not supported; leave it False.")
        self.check_nothing_waits()
        if any(True for _ in self._delayed()):
            raise NotPartitionedError(
                "delayed parameters have no values before the model is partitioned, which the "
                "first call of a step function does; read the state after that call."
            )
        state = self._state.whole(to_rank0=gather_to_rank0)
        if destination is None and not prefix:
            return state
        destination = {} if destination is None else destination
        destination.update((f"{prefix}{name}", value) for name, value in state.items())
        return destination

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
    ) -> Any:
        """Loads a whole or a partial state; before partitioning, an own part is kept for it.

        Collective for a partial state: every rank of the PP_GROUP.

        Args:
            state_dict: from ``state_dict``, ``local_state_dict`` or the unpartitioned model.
            strict: as in ``torch.nn.Module.load_state_dict``.
            same_partition_load: a partial state was saved on this rank under the same partition;
                nothing is exchanged.

        Returns:
            As ``torch.nn.Module.load_state_dict``; None if the state is kept for later: with
            ``same_partition_load``, or while delayed parameters wait for the partition.

        Raises:
            RuntimeError: torch's own, about missing or unexpected keys.
            CheckpointError: ``same_partition_load``, but it was another partition.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        state = copy.copy(state_dict)  # keeps torch's metadata
        is_partial = state.pop(PARTIAL_KEY, False)  # type: ignore[attr-defined]
        if is_partial and same_partition_load:
            self.when_partitioned(lambda: self._state.load_own(state, strict=strict))
            return None
        if is_partial:
            parts = collect(self._runtime, map_tensors(dict(state), torch.Tensor.cpu))
            state = {name: value for part in parts for name, value in part.items()}
        if any(True for _ in self._delayed()):
            self.when_partitioned(lambda: self._state.load(state, strict=strict))
            return None
        return self._state.load(state, strict=strict)

    def cpu(self) -> DistributedModel:
        """Moves the model to the host, complete: with the tensors of all ranks.

        Collective: every rank of the PP_GROUP. For evaluation or export through ``get_module()``:
        what it gathers does not follow further training.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        super().cpu()
        if self._placement is not None:
            self._state.gather_tensors()
        return self


def refuse_unsupported(function: str, **asked: object) -> None:
    """Raises for documented arguments whose feature this version does not have yet."""
    for name, value in asked.items():
        if value:
            raise UnsupportedError(
                f"{function}({name}={value!r}) is not supported yet; leave it at its default."
            )


@contextlib.contextmanager
def modules_adopted(runtime: TorchRuntime) -> Iterator[None]:
    """Tells models of the modules that a forward adds to them."""

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and runtime.random.is_active:
            for model in runtime.live_models():
                model.adopt(parent, name, child)

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()
