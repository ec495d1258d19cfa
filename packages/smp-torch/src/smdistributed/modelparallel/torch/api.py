"""The public functions of the PyTorch package, bound to the runtime of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.errors import NotInitializedError, UnsupportedError
from smdistributed.modelparallel.common.facade import Facade
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.torch import checkpoint, step_function
from smdistributed.modelparallel.torch.model import DistributedModel as BaseModel
from smdistributed.modelparallel.torch.model import refuse_unsupported
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer as BaseOptimizer
from smdistributed.modelparallel.torch.runtime import TorchRuntime, start

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
    start(slot, config)


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorates a function that computes one mini-batch: forward and backward, or forward alone.

    Usable as ``@smp.step``, ``@smp.step()`` and ``@smp.step(...)``. See ``StepFunction`` for what a
    call does. Collective: every process.

    Args:
        function: the function, when used without parentheses.
        non_split_inputs: names of arguments given whole to every microbatch.
        input_split_axes: batch axis by argument name; 0 for all others.
        detach_outputs: detach returned tensors; False needs one partition.

    Raises:
        ConfigError: an option names no argument of the function.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    return step_function.step(
        slot,
        function,
        non_split_inputs=non_split_inputs,
        input_split_axes=input_split_axes,
        detach_outputs=detach_outputs,
    )


class DistributedModel(BaseModel):
    """The user's model, split over the ranks of the pipeline; takes its place in the script.

    Collective: every process constructs it. The partition is decided in the first call of a step
    function; with one partition, here.

    Args:
        module: the model to distribute.
        trace_device: accepted; models are traced without memory, on no device.
        trace_execution_times: must be False: costs are counted, not measured.
        overlapping_allreduce: accepted; gradients are reduced at the end of the step.
        backward_passes_per_step: step calls whose gradients are summed before they are reduced.
        average_grads_across_microbatches: divide summed gradients by the number of microbatches.
        bucket_cap_mb: accepted.
        trace_memory_usage: must be False: memory is estimated from output sizes.
        broadcast_buffers: with ddp, buffers follow the first rank of the DP_GROUP at each step.
        gradient_as_bucket_view: accepted.

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
        bucket_cap_mb: int = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        refuse_unsupported(
            trace_execution_times=trace_execution_times, trace_memory_usage=trace_memory_usage
        )
        super().__init__(
            slot.get(),
            module,
            backward_passes_per_step=backward_passes_per_step,
            average_grads_across_microbatches=average_grads_across_microbatches,
            broadcast_buffers=broadcast_buffers,
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
        PartitionError: ``index`` is no partition.
    """
    slot.get().manual_partitions.set(module, index)


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
        partial: one file a rank, to continue from; False: the whole model in the file ``tag``.
        model: the DistributedModel.
        optimizer: the DistributedOptimizer; a full checkpoint leaves it out.
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
    trust_pickle: bool = False,
) -> Any:
    """Restores the model and the optimizer of this script from a checkpoint.

    A model that is not partitioned yet gets the partition and the weights in the first call of a
    step function. Collective: every process.

    Args:
        path: the folder.
        tag: which checkpoint; None takes the newest of its kind.
        partial: the kind of the checkpoint.
        strict: missing or unexpected names are errors.
        load_optimizer: restore the optimizer too; a full checkpoint has none.
        load_sharded_optimizer_state: without effect: optimizer state is not sharded yet.
        translate_function: must be None: no translation exists yet.
        trust_pickle: load user content of any class, which can run code from the file.

    Returns:
        The user content of the checkpoint, or None.

    Raises:
        CheckpointError: missing, damaged, or saved with other degrees.

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
        strict=strict,
        load_optimizer=load_optimizer,
        trust_pickle=trust_pickle,
    )


def save(obj: Any, f: str, partial: bool = True, *, v3: bool = False) -> None:
    """Saves an object as ``torch.save`` does, through a temporary file; one file a rank if partial.

    Local; call it with dp_rank 0 (partial) or rank 0 (not partial).

    Args:
        obj: what to save.
        f: file name; a partial file's gets ``_<mp_rank>``, or with ``v3``
            ``_<pp_rank>_<tp_rank>_<rdp_rank>``.
        partial: whether each caller writes a file of its own.
        v3: the longer name.

    Raises:
        TypeError: ``f`` is no str.
        FileNotFoundError: its folder does not exist.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    checkpoint.save(slot.get(), obj, f, partial=partial, v3=v3)


def load(
    f: str, map_location: Any = None, *, partial: bool = True, trust_pickle: bool = False
) -> Any:
    """Loads what ``smp.save`` or ``torch.save`` wrote.

    Args:
        f: file name, as it was given to ``smp.save``.
        map_location: as in ``torch.load``.
        partial: read this rank's own file.
        trust_pickle: load objects of any class, which can run code from the file.

    Raises:
        CheckpointError: there is no file of this rank.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    return checkpoint.load(
        slot.get(), f, partial=partial, map_location=map_location, trust_pickle=trust_pickle
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


class State:
    """What ``smp.state`` gives: the resolved configuration and the runtime's parts, read-only."""

    @property
    def cfg(self) -> Config:
        """The resolved configuration, one attribute a parameter."""
        return slot.get().config
