"""The model that replaces the user's: ``smp.DistributedModel``.

Source: smd_model_parallel_pytorch.rst, DistributedModel.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.common.errors import (
    ConfigError,
    NotPartitionedError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.torch.absence.optimizers import cleared_unseen
from smdistributed.modelparallel.torch.activations.blocks import checkpoint_blocks
from smdistributed.modelparallel.torch.execute.starts import differentiate
from smdistributed.modelparallel.torch.gradients.data_parallel import (
    DataParallel,
    DataParallelOptions,
)
from smdistributed.modelparallel.torch.model.additions import Additions
from smdistributed.modelparallel.torch.model.compiled import CompiledModules
from smdistributed.modelparallel.torch.model.drawing import DrawingModules
from smdistributed.modelparallel.torch.model.holder import NOT_PARTITIONED, Holder
from smdistributed.modelparallel.torch.model.hooks import OnceHooks
from smdistributed.modelparallel.torch.model.local_queries import LocalQueries
from smdistributed.modelparallel.torch.model.overlaps import overlaps_in
from smdistributed.modelparallel.torch.model.replacing import with_distributed_modules
from smdistributed.modelparallel.torch.model.saving import WholeState
from smdistributed.modelparallel.torch.model.sharding import (
    check_not_sharded,
    follow_compiled,
    name_sizes,
    shard_parameters,
)
from smdistributed.modelparallel.torch.model.shell import FP16_Module, JobsOwn, ModuleShell
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY, ModelState
from smdistributed.modelparallel.torch.model.tensor_queries import TensorParallelQueries
from smdistributed.modelparallel.torch.model.tracing import TracingOptions
from smdistributed.modelparallel.torch.model.whole_calls import WholeCalls
from smdistributed.modelparallel.torch.planning.placement import Placement
from smdistributed.modelparallel.torch.precision.casting import cast_model, half_type
from smdistributed.modelparallel.torch.precision.loss_scale import LossScale
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.compiled_calls import CompiledCalls
from smdistributed.modelparallel.torch.tensor_parallel.backward_passes import PassesAlone
from smdistributed.modelparallel.torch.tensor_parallel.copied import take_copy
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    slices_as_they_are,
    slices_guarded,
)
from smdistributed.modelparallel.torch.tensor_parallel.slices_at_rest import (
    SlicesAtRest,
    whole,
)


class DistributedModel(LocalQueries, TensorParallelQueries, JobsOwn, nn.Module):
    """The user's model, split over the ranks of the pipeline.

    Use it in place of the model in the rest of the script: call it and its ``backward`` inside a
    step function. The first call of a step function decides the partition, and each rank then
    keeps the parameters of its own. Collective: every process constructs it.

    Args:
        runtime: the state of the library in this process.
        module: the model to distribute, on the CPU.
        options: about data parallelism.
        tracing: what is measured while it is recorded.

    Raises:
        TypeError: ``module`` is no ``torch.nn.Module``.
        UnsupportedError: ``module`` contains TorchScript.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        module: nn.Module,
        options: DataParallelOptions,
        tracing: TracingOptions,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedModel takes a torch.nn.Module; received {type(module).__name__}."
            )
        super().__init__()
        self._given = weakref.ref(module)  # which distributed modules may take the place of
        refused = unmade(module)
        if refused is not None and runtime.topology.pp_size == 1:
            raise refused
        take_copy(module)  # if it is one of another one
        _check_overlaps(runtime, module)
        _check_renormalized(runtime, module)
        module = with_distributed_modules(runtime, module)
        checkpoint_blocks(module, runtime.config.checkpointed_blocks)
        cast_model(runtime.config, module, runtime.delayed)
        half = half_type(runtime.config)
        self.stand_for(module, ModuleShell(module if half is None else FP16_Module(module, half)))
        self.scaled_by: LossScale | None = None
        self.tracing = tracing
        self._runtime = runtime
        self.data_parallel = DataParallel(runtime, options)
        self._post_partition_hooks = OnceHooks()
        self._post_step_hooks = OnceHooks()
        self.number, self.place_in_keys = runtime.add_model(self)
        self.holder = Holder(runtime, module, self.place_in_keys)
        self._additions = Additions(runtime, self.holder)
        self.compiled = CompiledModules(self.holder)
        #: Parameters that came after the others were cut into shards, and their names.
        self._beside_shards: list[tuple[str, nn.Parameter]] = []
        self._compiled_calls = CompiledCalls()
        self._slices = SlicesAtRest(runtime.tensor_group, lambda: runtime.current_step is None)
        self.drawing = DrawingModules(runtime.random, self.holder, self.compiled)
        if self.partitioned:  # first shards, since the whole model may fit on no device
            shard_parameters(runtime, self.holder, self.data_parallel.shards)
            follow_compiled(self.holder, self.compiled, self._compiled_calls)
            self.holder.place_whole()
            name_sizes(self.holder, self.data_parallel.shards)
            self._attach_replicas()
        self._whole_state = WholeState(self, runtime.communicator)
        self._whole_calls = WholeCalls(runtime, self.holder.holds)
        self.holder.absence.calling = weakref.ref(self)
        if runtime.topology.size > 1:
            self._whole_state.watch(module)
        self.rest()

    def is_made_of(self, module: nn.Module) -> bool:
        """Whether a module is this model, or the user's that it was made of."""
        given = vars(self).get("_given")
        return given is not None and (module is self or module is given())

    def check_options(self, options: DataParallelOptions, tracing: TracingOptions) -> None:
        """Raises where the model is to be distributed again in another way; defaults ask nothing.

        Raises:
            ConfigError: it is; names the first option that differs.
        """
        for given, own in ((options, self.data_parallel.options), (tracing, self.tracing)):
            for field in dataclasses.fields(given):
                value, kept = getattr(given, field.name), getattr(own, field.name)
                if value not in (kept, field.default):
                    raise ConfigError(
                        "a DistributedModel that is given to smp.DistributedModel again is that "
                        f"model, with the options that it has: {field.name}={kept!r}; received "
                        f"{value!r}. Leave it out here, or give it where the model is wrapped "
                        "first."
                    )

    # ------------------------------------------------------------------ the user's calls

    def get_module(self) -> nn.Module:
        """Returns the user's own model."""
        return self.holder.fakes.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; with more than one partition, only inside a step function.

        Raises:
            SMPError: called outside a step function with more than one partition.
            UnsupportedError: code of the model reads a slice of a parameter that tensor
                parallelism has split as if it were the whole.
        """
        is_between = self._runtime.current_step is None
        if self._runtime.topology.pp_size > 1 and is_between and torch.is_grad_enabled():
            raise SMPError(
                "with more than one partition the model can only be called inside a function "
                "decorated with @smp.step, or between steps without gradients (torch.no_grad()), "
                "on every rank."
            )
        if self._runtime.current_step is None and self._runtime.tensor_group.is_prescaled:
            self.check_outside_steps()
        if isinstance(self.module.module, FP16_Module):
            args, kwargs = self.module.module.cast(args), self.module.module.cast(kwargs)
        if self._runtime.current_step is not None:
            return self.get_module()(*args, **kwargs)
        if self._runtime.tensor_group.passes is not None:
            self._runtime.tensor_group.passes.called_outside()
        with (
            self.parameters_awake(),
            slices_guarded([self.holder.fakes.slice_guard]),
            self._called_outside_steps(),
        ):
            return self.get_module()(*args, **kwargs)

    def _called_outside_steps(self) -> contextlib.AbstractContextManager[None]:
        shards = self.data_parallel.shards
        if shards is None:
            return contextlib.nullcontext()
        self._follow_compiled(has_changed=False)
        return shards.called_outside_steps()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch's."""
        with self.parameters_awake():
            if set_to_none:
                with cleared_unseen(self.parameters()):
                    super().zero_grad()
            else:
                super().zero_grad(set_to_none)
        self.data_parallel.restart_accumulation()

    def backward(
        self, tensors: Any, grad_tensors: Any = None, *, retain_graph: bool = False
    ) -> None:
        """Computes gradients over all partitions; takes the place of ``tensor.backward()``.

        Call it inside the step function. Gradients are final when the step function has returned.

        Args:
            tensors: the tensor, or tensors, to differentiate; usually the loss.
            grad_tensors: as in ``torch.autograd.backward``.
            retain_graph: likewise; inside a step function graphs are there for all calls.

        Raises:
            SMPError: called outside a step function with more than one partition, or again for
                what a call before has let go of.
            TypeError: ``tensors`` are no tensors.
        """
        step = self._runtime.current_step
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(given, list | tuple) or not all(map(torch.is_tensor, given)):
            is_item = isinstance(tensors, PendingNumber)
            received = "a number, as of .item()" if is_item else type(tensors).__name__
            raise TypeError(
                "model.backward takes the loss, a tensor that the model's outputs lead to, or a "
                f"list of such tensors; received {received}."
            )
        if step is not None:
            step.backward(self, tensors, grad_tensors, retain_graph=retain_graph)
        elif self._runtime.topology.pp_size > 1:
            raise SMPError(
                "with more than one partition model.backward can only be called inside a function "
                "decorated with @smp.step."
            )
        else:
            scale = self.apply_loss_scale()
            passes = self._runtime.tensor_group.passes or PassesAlone()
            run = functools.partial(passes.backward, retain_graph=retain_graph)
            differentiate(tensors, grad_tensors, 1.0 if scale is None else scale, run)

    @property
    def scales_losses(self) -> bool:
        """Whether losses are multiplied by a scale before they are differentiated."""
        return self._runtime.config.fp16

    def apply_loss_scale(self) -> torch.Tensor | None:
        """Returns what losses are multiplied by, and notes that the gradients to come carry it.

        Shape: scalar, on the device. None: by nothing.
        """
        if not self.scales_losses:
            return None
        optimizer = self._find_optimizer()
        self.scaled_by = None if optimizer is None else optimizer.applied_loss_scale
        return None if self.scaled_by is None else self.scaled_by.scale

    def compile(self, **options: Any) -> None:
        """Compiles the model in place, as ``torch.nn.Module.compile`` does.

        ``torch.compile(model)`` does the same, and returns the model. With more than one partition
        each part of the model that lies on one partition is compiled alone.

        Args:
            options: of ``torch.compile``.
        """
        self.get_module().compile(**options)

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
        self._check_no_sequences("join", "ranks that share a sequence cannot run out of it alone")
        return self.data_parallel.join(
            divide_by_initial_world_size, enable, throw_on_early_termination
        )

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Lets steps add gradients up that no data-parallel rank has shared yet.

        As with ``DistributedDataParallel``: the first step with a backward pass after the context
        reduces them all, or ``optimizer.step()``, if that comes before. Every data-parallel rank
        has the same steps in it. An addition of this library: ``backward_passes_per_step`` does it
        for a fixed number of steps, of which those inside the context count, too.

        Raises:
            SMPError: called in a step function.
        """
        if self._runtime.is_in_step:
            raise SMPError(
                "model.no_sync() goes around calls of step functions, which reduce gradients when "
                "they end; it was called in one: put it around the call."
            )
        return self.data_parallel.no_sync()

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
        self._check_no_sequences(
            "register_comm_hook", "a hook would have to average over DP_CP_GROUP, not DP_GROUP"
        )
        self.data_parallel.register_comm_hook(state, callable)

    def _check_no_sequences(self, name: str, why: str) -> None:
        if self._runtime.context_group is not None:
            raise UnsupportedError(
                f"model.{name} does not go with context_parallel_degree "
                f"{self._runtime.topology.cp_size}, since {why}: leave it out, or set the degree "
                "to 1."
            )

    _register_comm_hook = register_comm_hook

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a function to run once, after partitioning, in the first step call.

        It is called as ``hook(model, optimizer)`` if it takes two arguments, else as ``hook()``.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        if self.partitioned:
            warnings.warn(
                "the model is partitioned already; this post-partition hook will not run.",
                stacklevel=2,
            )
        return self._post_partition_hooks.add(hook)

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a function to run once, after the next step call with a backward pass.

        Gradients are final then and ``optimizer.step`` has not been called yet. It is called as
        ``hook(model, optimizer)`` if it takes two arguments, else as ``hook()``.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        return self._post_step_hooks.add(hook)

    # ------------------------------------------------------------------ called by the step

    @property
    def partitioned(self) -> bool:
        """Whether the partition is decided, by the first step call; with one partition, at once."""
        return self.holder.partitioned

    @property
    def placement(self) -> Placement:
        """Where every module is.

        Raises:
            NotPartitionedError: that is not decided.
        """
        return self.holder.placement

    def refresh(self) -> None:
        """Takes the user's changes to the structure of the model: modules, parameters, ties.

        Called at the start of each step, on every process. What is compiled now is noted too.

        Raises:
            PartitionError: a parameter is now shared between partitions.
        """
        self._whole_state.close()
        self._whole_calls.let_go()
        self.wake()
        if not self.holder.fakes.is_current:
            self._slices.follow(self.get_module(), self.holder.fakes.slice_guard)
        has_changed = self.holder.refresh()
        if has_changed and self.partitioned:
            name_sizes(self.holder, self.data_parallel.shards)
            self._beside_shards = self._find_beside_shards()
        self._check_beside_shards()
        self._follow_compiled(has_changed=has_changed)
        if has_changed and self.partitioned:
            self.data_parallel.watch(
                self.default_reducer_named_parameters(),
                self.scaled_batch_reducer_named_parameters(),
            )

    def _find_beside_shards(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters that came after the others were cut into shards."""
        shards = self.data_parallel.shards
        if shards is None or not shards.model.units:
            return []
        known = self.data_parallel.updates()
        return [each for each in self.local_named_parameters() if each[1] not in known]

    def _check_beside_shards(self) -> None:
        for name, parameter in self._beside_shards:
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"{name} has been put into the model after its parameters were cut into "
                    "shards (sharded_data_parallel_degree), and would not be trained: change the "
                    "model before smp.DistributedModel, and load its state into that; or freeze "
                    "it with requires_grad_(False)."
                )

    def _follow_compiled(self, *, has_changed: bool) -> None:
        """Takes what is compiled now.

        Args:
            has_changed: the structure of the model has.
        """
        if self.compiled.refresh() or has_changed:
            self.drawing.refresh()
            follow_compiled(self.holder, self.compiled, self._compiled_calls)

    def wake(self) -> bool:
        """Has parameters be tensors of torch; returns whether some were not."""
        has_slices = self._slices.wake()
        return self.holder.ownership.wake() or has_slices

    @contextlib.contextmanager
    def parameters_awake(self) -> Iterator[None]:
        """Inside, this library uses parameters as they are."""
        if self._runtime.current_step is not None:
            with slices_as_they_are():
                yield
            return
        self.wake()
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Has parameters stand for whole ones, and know who has them; all run the same Python."""
        self._slices.rest(self.holder.fakes.slice_guard.tensors())
        self.holder.ownership.rest()

    def begin_call(self) -> None:
        """See ``Calling``."""
        check_not_sharded(self.holder)
        self._check_has_values("a call between steps")
        self.follow_changes()
        with slices_as_they_are():
            self.wake()
            self._whole_calls.begin(self.holder.fakes)

    def end_call(self) -> None:
        """See ``Calling``."""
        self._whole_calls.end()
        self.rest()

    def adopt(self, parent: nn.Module, name: str, added: nn.Module | nn.Parameter) -> None:
        """Takes a module or parameter that code adds during a step; called before it is there.

        Raises:
            UnsupportedError: it has gradients, which replicas would not average.
        """
        parent = self.get_module() if parent is self else parent
        if isinstance(added, nn.Module):
            self.drawing.adopt(parent, name, added)
        self._additions.note(parent, name, added)

    def take_growth(self) -> None:
        """Takes what was added during the step that has ended."""
        if self._additions.take():
            self.refresh()

    def place(self, placement: Placement) -> None:
        """Keeps the tensors of the own partition, on the device, and frees the others'.

        Called by the first step, on every process.
        """
        self.holder.place(placement)
        shard_parameters(self._runtime, self.holder, self.data_parallel.shards)
        name_sizes(self.holder, self.data_parallel.shards)
        if self.compiled.refresh():
            self.drawing.refresh()
        follow_compiled(self.holder, self.compiled, self._compiled_calls)
        self._attach_replicas()
        self.holder.run_waiting()
        self._post_partition_hooks.run(self, self._find_optimizer)

    def run_post_step_hooks(self) -> None:
        """Runs what waits for the end of a step with a backward pass."""
        self._post_step_hooks.run(self, self._find_optimizer)

    def _attach_replicas(self) -> None:
        self.data_parallel.attach(
            self.default_reducer_named_parameters(),
            self.scaled_batch_reducer_named_parameters(),
            self.holder.buffers,
        )

    def _find_optimizer(self) -> Any:
        return next((each for each in self._runtime.live_optimizers() if each.serves(self)), None)

    # ------------------------------------------------------------------ state

    @property
    def _state(self) -> ModelState:
        return ModelState(self._runtime, self.holder)

    def follow_changes(self) -> None:
        """Takes what the script has changed of the model's structure since the last step."""
        if self._runtime.current_step is None and not self.holder.fakes.is_current:
            with self.parameters_awake():
                self.refresh()

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the parameters and buffers of this rank, and whether that is only a part.

        Shape: those of the unpartitioned model: a tensor lives on one partition as a whole.

        Raises:
            NotPartitionedError: the model is not partitioned yet.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        if not self.partitioned:
            raise NotPartitionedError(NOT_PARTITIONED)
        self.follow_changes()
        self.holder.check_values()
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

        Shape: those of the unpartitioned model.

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
            SMPError: called in a step function with more than one partition.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        self._check_has_values("state_dict")
        if keep_vars:
            raise UnsupportedError("state_dict(keep_vars=True) is not supported; leave it False.")
        self.holder.check_nothing_waits()
        self.follow_changes()
        if self.partitioned:
            self.holder.check_values()
        if any(True for _ in self.holder.delayed()):
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

        Collective for a partial state: every rank of the PP_GROUP; for that of a copy in slices: of
        the TP_GROUP.

        Args:
            state_dict: from ``state_dict``, ``local_state_dict`` or the unpartitioned model.
            strict: as in ``torch.nn.Module.load_state_dict``.
            same_partition_load: a partial state was saved on this rank under the same partition;
                nothing is exchanged.

        Returns:
            As ``torch.nn.Module.load_state_dict``; None if the state is kept for later: with
            ``same_partition_load``, or while delayed parameters or shards wait for the partition.

        Raises:
            RuntimeError: torch's own, about missing or unexpected keys.
            CheckpointError: ``same_partition_load``, but it was another partition.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        self._check_has_values("load_state_dict")
        self.follow_changes()
        state = copy.copy(state_dict)  # keeps torch's metadata
        for name, value in state_dict.items():
            if torch.is_tensor(value):
                state[name] = whole(value)  # type: ignore[index]
        is_partial = state.pop(PARTIAL_KEY, False)  # type: ignore[attr-defined]
        if is_partial and same_partition_load:
            self.holder.when_partitioned(lambda: self._state.load_own(state, strict=strict))
            return None
        if is_partial and self.data_parallel.shards is not None and not self.partitioned:
            # Of which shards it has the parts is known then.
            self.holder.when_partitioned(
                lambda: self._state.load(self._state.merged(state), strict=strict)
            )
            return None
        if is_partial:
            state = self._state.merged(state)
        if any(True for _ in self.holder.delayed()):
            self.holder.when_partitioned(lambda: self._state.load(state, strict=strict))
            return None
        return self._state.load(state, strict=strict)

    def name_ties(self, state: dict[str, Any]) -> None:
        """Gives a whole state all names of its tensors, where it has each of them once."""
        self._state.name_ties(state)

    def _check_has_values(self, method: str) -> None:
        if self._runtime.is_in_step and self._runtime.topology.pp_size > 1:
            raise SMPError(
                f"{method} of a DistributedModel was called in a step function, in which "
                "parameters have no values with more than one partition: call it between two steps."
            )

    def cpu(self) -> DistributedModel:
        """Moves the model to the host, complete: with the tensors of all ranks.

        Collective: every rank of the PP_GROUP. For evaluation or export through ``get_module()``:
        what it gathers goes again with the next call of a step function.

        Raises:
            SMPError: called in a step function with more than one partition.

        Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
        """
        check_not_sharded(self.holder)
        self._check_has_values("cpu")
        self.follow_changes()
        super().cpu()
        if self.holder.is_partial:
            self._state.gather_tensors()
        return self


def _check_renormalized(runtime: TorchRuntime, module: nn.Module) -> None:
    """Refuses embeddings whose calls write to their weight by what one replica sees.

    Raises:
        UnsupportedError: there is one.
    """
    if not runtime.config.ddp or runtime.topology.dp_cp_size == 1:
        return
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            raise UnsupportedError(
                f"{name} has max_norm={each.max_norm!r}: its calls shorten the rows that they look "
                "up, which differ between data-parallel ranks, so their weights would. Leave "
                "max_norm out, and bound the rows after optimizer.step(), with torch.renorm, on "
                "every rank."
            )


def is_made(module: nn.Module) -> bool:
    """Whether the parameters and buffers of a module itself have a shape."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return not any(each is not None and is_lazy(each) for each in tensors)


def unmade(module: nn.Module) -> UnsupportedError | None:
    """Returns why a model cannot be used yet: the first call of a module makes its parameters."""
    for name, each in module.named_modules():
        if not is_made(each):
            return UnsupportedError(
                f"{name or 'the model'} ({type(each).__name__}) has parameters without a shape "
                "before it is called first, so nobody knows which rank they fit on: run the model "
                "once on an example before smp.DistributedModel, as in plain PyTorch before an "
                "optimizer is made."
            )
    return None


def _check_overlaps(runtime: TorchRuntime, module: nn.Module) -> None:
    """Refuses parameters that share memory, where a rank would have parts of them.

    Raises:
        UnsupportedError: there are some.
    """
    topology = runtime.topology
    is_cut = runtime.sharding_groups is not None or topology.tp_size > 1
    if not (is_cut or (runtime.config.shard_optimizer_state and topology.dp_cp_size > 1)):
        return
    for one, other in overlaps_in(module):
        raise UnsupportedError(
            f"{one} and {other} have memory in common and are two objects, as after a.data = "
            "b.data: with tensor parallelism, sharded data parallelism and shard_optimizer_state "
            "ranks have parts of them, or update one each. Let both be one parameter (module.a = "
            "other.b), or give one memory of its own."
        )


def models_of(runtime: TorchRuntime) -> list[DistributedModel]:
    """Returns the models of this process that exist, in order of creation."""
    return cast(list[DistributedModel], runtime.live_models())
