"""What a script says while it builds a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import (
    PartitionError,
)
from smdistributed.modelparallel.torch.activations import checkpointing
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.model.distributed import models_of


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
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """The one context to make a model in.

    Parameters are delayed (see ``delay_param_initialization``) where the configuration says
    ``delayed_parameter_initialization``.

    Args:
        tensor_parallelism: mark modules as ``smp.tensor_parallelism`` does; with one
            tensor-parallel rank they become distributed modules too, of which scripts know the
            names (``transformer.seq_layers``).
        dtype: of the parameters; None takes torch's default.
        tensor_parallel_config: for the distributed modules; ignored without tensor parallelism.

    Raises:
        TypeError: ``dtype`` is no floating-point type.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """
    runtime = slot.get()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype; received {dtype!r}.")
    delayed = runtime.config.delayed_parameter_initialization
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype or former)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(delay_param_initialization(delayed))
            if tensor_parallelism:
                marks = runtime.tensor_marks
                stack.enter_context(
                    marks.creating(True, tensor_parallel_config, at_any_degree=True)
                )
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
    if runtime.topology.pp_size > 1 and isinstance(module, nn.Module):
        for model in models_of(runtime):
            if model.partitioned and module in model.holder.fakes.names:
                raise PartitionError(
                    "set_partition must come before the first call of a step function with the "
                    f"model; {model.holder.fakes.names[module] or type(module).__name__} has its "
                    f"partition, {model.holder.partition_of(module)}."
                )
    runtime.manual_partitions.set(module, index)


def partition_of(module: nn.Module) -> int | None:
    """Returns the partition of a module of a DistributedModel; None while it is not decided."""
    for model in models_of(slot.get()) if slot.is_filled else ():
        if module in model.holder.fakes.names:
            found: int | None = model.holder.partition_of(module)
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
        pack_args_as_tuple: the layers of an ``nn.Sequential`` take a tuple as their one argument;
            transformer layers of ``smp.nn`` do in any case.
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
    checkpointing.mark(module, preserve_rng_state, pack_args_as_tuple, strategy, partition_of)
