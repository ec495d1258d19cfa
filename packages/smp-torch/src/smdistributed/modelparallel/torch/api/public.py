"""The public functions of the PyTorch package, bound to the runtime of this process."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.common.errors import (
    NotInitializedError,
    PartitionError,
    UnsupportedError,
)
from smdistributed.modelparallel.common.facade import Facade
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.torch.activations import checkpointing as activation_checkpointing
from smdistributed.modelparallel.torch.checkpoint import rank_files
from smdistributed.modelparallel.torch.checkpoint import save_and_resume as checkpoint
from smdistributed.modelparallel.torch.compat.original_forward import original_forward
from smdistributed.modelparallel.torch.gradients import norm as gradient_norm
from smdistributed.modelparallel.torch.gradients import overflow as loss_scaling
from smdistributed.modelparallel.torch.gradients.data_parallel import DataParallelOptions
from smdistributed.modelparallel.torch.model.distributed import DistributedModel as BaseModel
from smdistributed.modelparallel.torch.model.distributed import modules_adopted, refuse_unsupported
from smdistributed.modelparallel.torch.optimizer.distributed import (
    DistributedOptimizer as BaseOptimizer,
)
from smdistributed.modelparallel.torch.random import streams as random_streams
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime, start
from smdistributed.modelparallel.torch.stepping import function as step_function

slot: RuntimeSlot[TorchRuntime] = RuntimeSlot()
facade = Facade(slot)


def init(config: Mapping[str, object] | str | os.PathLike[str] | None = None) -> None:
    """Starts the library in this process: reads the configuration, joins the job, builds groups.

    Call it first. Collective: every process. A second call has no effect but a warning.

    Args:
        config: parameters by name, or the path of a YAML or JSON file with them. What the launcher
            set in ``SM_HP_MP_PARAMETERS`` wins over it, key by key.

    Raises:
        ConfigError: the configuration breaks a rule; the message lists all problems.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    is_first = not slot.is_filled
    start(slot, config)
    if is_first:
        runtime = slot.get()
        runtime.replacements.enter_context(gradient_norm.norms_of_whole_models(runtime))
        runtime.replacements.enter_context(loss_scaling.shared_overflows(runtime))
        runtime.replacements.enter_context(random_streams.repeatable_checkpoints(runtime.random))
        runtime.replacements.enter_context(modules_adopted(runtime))
        runtime.replacements.enter_context(original_forward())


def step(
    non_split_inputs: Iterable[str] | Callable[..., Any] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorates a function that computes one mini-batch: forward and backward, or forward alone.

    Usable as ``@smp.step``, ``@smp.step()`` and ``@smp.step(...)``. See ``StepFunction`` for what a
    call does. Collective: every process.

    Args:
        non_split_inputs: names of arguments given whole to every microbatch; or the function,
            when used without parentheses.
        input_split_axes: batch axis by argument name; 0 for all others.
        detach_outputs: detach returned tensors; False needs one partition.

    Raises:
        ConfigError: an option names no argument of the function.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    function, names = non_split_inputs, None
    if not callable(function):
        function, names = None, function
    return step_function.step(
        slot,
        function,
        non_split_inputs=names,
        input_split_axes=input_split_axes,
        detach_outputs=detach_outputs,
    )


def is_tracing() -> bool:
    """Tells whether the step function runs on fake tensors at present, to be recorded.

    Code of a model can leave out side effects then.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """
    step = slot.get().current_step
    return step is not None and step.is_tracing


def _check_tracing(device: str, times: bool) -> None:
    if device not in ("cpu", "gpu"):
        raise ValueError(f"trace_device must be 'cpu' or 'gpu'; received {device!r}.")
    if times and device == "cpu":
        raise ValueError(
            "trace_execution_times=True needs trace_device='gpu'; received trace_device='cpu': "
            "leave one of them at its default."
        )


class DistributedModel(BaseModel):
    """The user's model, split over the ranks of the pipeline; takes its place in the script.

    Collective: every process constructs it. The partition is decided in the first call of a step
    function; with one partition, here.

    Args:
        module: the model to distribute.
        trace_device: accepted; models are traced without memory, on no device.
        trace_execution_times: accepted: costs are counted, not measured, on any device.
        overlapping_allreduce: with ddp, reduce each bucket of gradients over the data-parallel
            ranks as soon as it is complete; False: all at the end of the step.
        backward_passes_per_step: step calls whose gradients are summed before they are reduced.
        average_grads_across_microbatches: divide summed gradients by the number of microbatches
            (the loss is a mean over the batch); False only sums.
        bucket_cap_mb: size of a bucket of gradients, in MiB.
        trace_memory_usage: accepted: memory is counted from the sizes of what is kept.
        broadcast_buffers: with ddp, buffers follow the first rank of the DP_GROUP at each step.
        gradient_as_bucket_view: leave gradients in their buckets, which saves a copy of them; do
            not call ``detach_`` on such a gradient.
        find_unused_parameters: accepted; unused parameters are always found: one that has a
            gradient on some data-parallel ranks counts as zero on the others, and one that has
            none anywhere keeps none.

    Raises:
        TypeError: ``module`` is no ``torch.nn.Module``, or another argument has a wrong type.
        ValueError: a number is too small, or options exclude each other.

    Source: smd_model_parallel_pytorch.rst, DistributedModel.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        _check_tracing(trace_device, trace_execution_times)
        super().__init__(
            slot.get(),
            module,
            DataParallelOptions(
                overlapping_allreduce=overlapping_allreduce,
                backward_passes_per_step=backward_passes_per_step,
                average_grads_across_microbatches=average_grads_across_microbatches,
                bucket_cap_mb=bucket_cap_mb,
                broadcast_buffers=broadcast_buffers,
                gradient_as_bucket_view=gradient_as_bucket_view,
                find_unused_parameters=find_unused_parameters,
            ),
        )


class DistributedOptimizer(BaseOptimizer):
    """A torch optimizer over the parameters of a distributed model; use it like the wrapped one.

    Args:
        optimizer: the torch optimizer to wrap.
        static_loss_scale: without effect unless fp16 is configured.
        dynamic_loss_scale: without effect unless fp16 is configured.
        dynamic_loss_args: without effect unless fp16 is configured.
        dynamic_loss_kwargs: without effect unless fp16 is configured.

    Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **dynamic_loss_kwargs: Any,
    ) -> None:
        super().__init__(slot.get(), optimizer)


def delay_param_initialization(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Lets the parameters of a model made inside take no memory until their rank is known.

    Their values are those of an immediate construction with the same random state. Until the model
    is partitioned, in the first call of a step function (with one partition: by DistributedModel),
    parameters and large buffers are on torch's meta device. Change and tie them inside; load states
    with ``DistributedModel.load_state_dict``.

    Args:
        enabled: False does nothing.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """
    runtime = slot.get()
    return runtime.delayed.delaying() if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: object,
) -> Iterator[None]:
    """The one context to make a model in.

    Parameters are delayed (see ``delay_param_initialization``) where the configuration says
    ``delayed_parameter_initialization``.

    Args:
        tensor_parallelism: without effect with one tensor-parallel rank; there are not more yet.
        dtype: of the parameters; None takes torch's default.
        tensor_parallel_config: ignored without tensor parallelism.

    Raises:
        TypeError: ``dtype`` is no floating-point type.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """
    runtime = slot.get()
    if tensor_parallelism and runtime.topology.tp_size > 1:
        refuse_unsupported("model_creation", tensor_parallelism=tensor_parallelism)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype; received {dtype!r}.")
    delayed = runtime.config.delayed_parameter_initialization
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype or former)
    try:
        with delay_param_initialization(delayed):
            yield
    finally:
        torch.set_default_dtype(former)


def partition(index: int) -> contextlib.AbstractContextManager[None]:
    """Assigns modules created inside the context to a partition.

    The innermost context wins; modules outside go to ``default_partition``. Without effect when
    ``auto_partition`` is on.

    Raises:
        PartitionError: ``index`` is no partition.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """
    return slot.get().manual_partitions.creating(index)


def set_partition(module: nn.Module, index: int) -> None:
    """Assigns a module and all modules below it to a partition, before the first step call.

    Raises:
        PartitionError: ``index`` is no partition, or the model is partitioned already.
    """
    runtime = slot.get()
    if runtime.topology.pp_size > 1:
        for model in runtime.live_models():
            if model.partitioned and module in model.fakes.names:
                raise PartitionError(
                    "set_partition must come before the first call of a step function with the "
                    f"model; {model.fakes.names[module] or type(module).__name__} has its "
                    f"partition, {model.partition_of(module)}."
                )
    runtime.manual_partitions.set(module, index)


def partition_of(module: nn.Module) -> int | None:
    """Returns the partition of a module of a DistributedModel; None while it is not decided."""
    for model in slot.get().live_models() if slot.is_filled else ():
        if module in model.fakes.names:
            found: int | None = model.partition_of(module)
            return found
    return None


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Has a module of a finished model compute its activations again in the backward pass.

    For code that cannot be edited; else see ``patches.checkpoint`` or ``torch.utils.checkpoint``.
    Call it on every process alike, before the first call of a step function.

    Args:
        module: a module; or an ``nn.Sequential``, whose layers are checkpointed by ``strategy``;
            or an ``nn.ModuleList``, of which each child is checkpointed alone whatever the
            strategy, since the code between them is not part of it.
        preserve_rng_state: repeat random numbers in the second computation. Those that modules
            draw inside a step are repeated always.
        pack_args_as_tuple: the layers of an ``nn.Sequential`` take a tuple as their one argument.
        strategy: ``"each"``, ``"contiguous"`` or ``"group_<x>"``; see
            ``patches.checkpoint.checkpoint_sequential``.

    Raises:
        ValueError: no such strategy, or an option for another kind of module.
        TypeError: ``module`` is no ``nn.Module``.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Activation Checkpointing APIs.
    """
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)
    if not is_list and (pack_args_as_tuple or strategy != "each"):
        raise ValueError(
            "pack_args_as_tuple and strategy are for nn.Sequential and nn.ModuleList; received "
            f"them for {type(module).__name__}: leave them out."
        )
    activation_checkpointing.mark(
        module, preserve_rng_state, pack_args_as_tuple, strategy, partition_of
    )


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients so that their norm over the whole model is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` does the same with the parameters of a DistributedModel.
    Call it after the step function; a scaler unscales first.

    Collective: every rank of the PP_GROUP, also one without gradients.

    Args:
        parameters: of a DistributedModel, or the model itself.
        max_norm: the largest norm allowed.
        norm_type: order of the norm; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        foreach: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, the same on every rank of the PP_GROUP.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

    Source: model-parallel-customize-training-script-pt.md, Important Considerations.
    """
    slot.get()
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int,
    partial: bool = True,
    model: BaseModel | None = None,
    optimizer: BaseOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Saves a checkpoint that a later job can resume from; never leaves half of one.

    Collective: every process; the library picks the writers. On return everything is on disk.

    Args:
        path: the folder; made if missing.
        tag: the same on all ranks, normally the step.
        partial: one file a rank, to continue from to the last bit: it also holds the partition
            and the state of the random generators of each rank. False: the whole model in the file
            ``tag``, and the whole optimizer state in ``optimizer_<tag>``, for torch alone to load.
        model: the DistributedModel.
        optimizer: the DistributedOptimizer.
        user_content: anything that ``torch.save`` takes; returned on resume.
        translate_if_full: accepted; no translation exists yet.
        num_kept_partial_checkpoints: remove older partial checkpoints beyond this number.

    Raises:
        TypeError: ``model`` or ``optimizer`` is not wrapped.
        CheckpointError: some rank failed to write; nothing was committed.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    checkpoint.save_checkpoint(
        slot.get(),
        path,
        tag,
        partial=partial,
        model=model,
        optimizer=optimizer,
        user_content=user_content,
        num_kept_partial_checkpoints=num_kept_partial_checkpoints,
    )


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
    *,
    load_optimizer_states: bool | None = None,
    model: BaseModel | None = None,
    optimizer: BaseOptimizer | None = None,
    trust_pickle: bool = False,
) -> Any:
    """Restores the model and the optimizer of this script from a checkpoint.

    A partial checkpoint also restores the state of the random generators (torch's of the host and
    of the device, Python's, NumPy's if it is imported), so that training goes on as if it had not
    stopped. With the degrees that it was saved with, its partition is taken over, and a model that
    is not partitioned yet gets the weights in the first call of a step function. With another
    ``pipeline_parallel_degree``, or another partition already in place, every rank takes its share
    of all parts, and the random state of the first rank of its pipeline. A replica that the saving
    job did not have keeps the random state that the script gave it. Collective: every process.

    Args:
        path: the folder.
        tag: which checkpoint; None takes the newest of its kind. With ``partial=False`` it can be
            the name of a file that ``torch.save`` wrote from the state of the plain model.
        partial: the kind of the checkpoint.
        strict: missing or unexpected names are errors.
        load_optimizer: restore the optimizer too, if the checkpoint holds its state.
        load_sharded_optimizer_state: without effect: optimizer state is not sharded yet.
        translate_function: must be None: no translation exists yet.
        load_optimizer_states: the former name of ``load_optimizer``.
        model: which DistributedModel to restore; by default the one made last.
        optimizer: which DistributedOptimizer to restore; by default the one made last.
        trust_pickle: load user content of any class, which can run code from the file.

    Returns:
        The user content of the checkpoint, or None.

    Raises:
        CheckpointError: missing, damaged, saved with another ``tensor_parallel_degree``, or with
            optimizer state for which there is no optimizer; on all ranks.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    if translate_function is not None:
        raise UnsupportedError(
            "translate_function is not supported yet; translate the state first."
        )
    return checkpoint.resume_from_checkpoint(
        slot.get(),
        path,
        tag,
        partial=partial,
        model=model,
        optimizer=optimizer,
        strict=strict,
        load_optimizer=load_optimizer if load_optimizer_states is None else load_optimizer_states,
        trust_pickle=trust_pickle,
    )


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    *,
    v3: bool = False,
) -> None:
    """Saves an object as ``torch.save`` does, through a temporary file; one file a rank if partial.

    Local; call it with dp_rank 0 (partial) or rank 0 (not partial).

    Args:
        obj: what to save.
        f: file name; a partial file's gets ``_<mp_rank>``, or with ``v3``
            ``_<pp_rank>_<tp_rank>_<rdp_rank>``.
        partial: whether each caller writes a file of its own.
        pickle_module: as in ``torch.save``.
        pickle_protocol: as in ``torch.save``.
        v3: the longer name.

    Raises:
        TypeError: ``f`` is no str.
        FileNotFoundError: its folder does not exist.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    rank_files.save(
        slot.get(),
        obj,
        f,
        partial=partial,
        v3=v3,
        pickle_module=pickle_module,
        pickle_protocol=pickle_protocol,
    )


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    *,
    partial: bool = True,
    back_compat: bool = False,
    pickle_load_args: Mapping[str, Any] | None = None,
    **more_pickle_load_args: Any,
) -> Any:
    """Loads what ``smp.save`` or ``torch.save`` wrote; by default tensors and plain values only.

    Local. A file of objects of other classes needs ``weights_only=False``, which can run code from
    the file.

    Args:
        f: file name, as it was given to ``smp.save``.
        map_location: as in ``torch.load``.
        pickle_module: as in ``torch.load``; another than ``pickle`` needs ``weights_only=False``.
        partial: read this rank's own file.
        back_compat: accepted, without effect.
        pickle_load_args: passed on to ``torch.load``, as the further arguments by keyword are.
        more_pickle_load_args: passed on to ``torch.load``.

    Raises:
        TypeError: ``f`` is no str.
        CheckpointError: there is no file of this rank; lists those found and their degrees.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    return rank_files.load(
        slot.get(),
        f,
        partial=partial,
        map_location=map_location,
        pickle_module=pickle_module,
        arguments={**(pickle_load_args or {}), **more_pickle_load_args},
    )


def get_world_process_group() -> dist.ProcessGroup:
    """Returns torch's group of all processes. Needs ``ddp: True``.

    Source: smd_model_parallel_common_api.rst, MPI Basics.
    """
    return _process_group(CommGroup.WORLD)


def get_mp_process_group() -> dist.ProcessGroup:
    """Returns torch's group of the ranks that hold this model replica. Needs ``ddp: True``."""
    return _process_group(CommGroup.MP_GROUP)


def get_dp_process_group() -> dist.ProcessGroup:
    """Returns torch's group of the ranks that hold this partition. Needs ``ddp: True``."""
    return _process_group(CommGroup.DP_GROUP)


def get_pp_process_group() -> dist.ProcessGroup:
    """Returns torch's group of this pipeline. Needs ``ddp: True``."""
    return _process_group(CommGroup.PP_GROUP)


def get_tp_process_group() -> dist.ProcessGroup:
    """Returns torch's group of this tensor-parallel group. Needs ``ddp: True``."""
    return _process_group(CommGroup.TP_GROUP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """Returns torch's group of the ranks with this partition and these slices. Needs ``ddp``."""
    return _process_group(CommGroup.RDP_GROUP)


def _process_group(kind: CommGroup) -> dist.ProcessGroup:
    runtime = slot.get()
    if not runtime.config.ddp:
        raise RuntimeError(
            "torch process groups need the parameter ddp to be True; it is False: set ddp: True "
            "in the configuration."
        )
    if kind not in runtime.process_groups:
        raise NotInitializedError(
            "a job of one process has no torch process groups; start it with smprun, mpirun or "
            "torchrun."
        )
    return runtime.process_groups[kind]
