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
from smdistributed.modelparallel.common.errors import NotInitializedError
from smdistributed.modelparallel.common.facade import Facade
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.torch import step_function
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
