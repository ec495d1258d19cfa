"""What a training loop is made of: step function, model, optimizer, clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import torch
from torch import nn

from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.device_memory.telling import tell_before_training
from smdistributed.modelparallel.torch.gradients.data_parallel import DataParallelOptions
from smdistributed.modelparallel.torch.model.distributed import DistributedModel as BaseModel
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.model.tracing import TracingOptions
from smdistributed.modelparallel.torch.optimizer.distributed import (
    DistributedOptimizer as BaseOptimizer,
)
from smdistributed.modelparallel.torch.precision.loss_scale import options_of
from smdistributed.modelparallel.torch.stepping import function as step_function


def step(
    non_split_inputs: Iterable[str] | Callable[..., Any] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    static: bool = False,
    cuda_graphs: bool | Literal["auto"] = "auto",
    compile: bool | Mapping[str, Any] = False,
    sequence_dims: Mapping[str, int | None] | None = None,
) -> Any:
    """Decorates a function that computes one mini-batch: forward and backward, or forward alone.

    Usable as ``@smp.step``, ``@smp.step()`` and ``@smp.step(...)``. See ``StepFunction`` for what a
    call does. Collective: every process.

    Shape: an argument of (batch, ...) is (microbatch, ...) in the function, split along its batch
    axis; results are those of the microbatches, in a ``StepOutput``.

    Args:
        non_split_inputs: names of arguments given whole to every microbatch; or the function,
            when used without parentheses.
        input_split_axes: batch axis by argument name; 0 for all others.
        detach_outputs: detach returned tensors; False needs one partition.
        static: an addition of this library, a promise that the Python of the function, and of the
            modules that are split, does the same in every call with such arguments and needs not
            run: with several partitions it runs in one call of a hundred. Where it asks about data,
            or is given objects with state, it runs in every call.
        cuda_graphs: an addition of this library: on GPUs the kernels of each pass are captured in
            the third call of a kind, and launched at once after that, where the Python of the pass,
            which runs in every call, does the same. "auto" captures with several partitions,
            without replicas, and with parameters in shards that the GPUs of one host read, where
            as much memory is free again as a step needs; True also elsewhere, and a warning says
            what runs as it is. False never.
        compile: an addition of this library: what lies between the products of passes that run as
            CUDA graphs, within modules too, is compiled; with several partitions, where there are
            no graphs, what lies between modules, such as a loss. A dictionary gives options of
            ``torch.compile``. What the compiler refuses runs as it is, and a warning says why.
        sequence_dims: an addition of this library, for ``context_parallel_degree``: the dim along
            which an argument has its sequence, by its name, or by that of its place in a dict; None
            if it has none. Not needed for the names that models of Transformers have.

    Raises:
        ConfigError: an option names no argument of the function, or none of ``torch.compile``; from
            a call, where sequences are cannot be told, or they do not divide.
        UnsupportedError: from a call, code reads across a sequence that is split.
        SMPError: from a call, ``static`` was promised, and the Python did something else.

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
        static=static,
        cuda_graphs=cuda_graphs,
        compile=compile,
        sequence_dims=sequence_dims,
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
        module: the model to distribute. If it is a DistributedModel, or the model of one, that one
            is returned as it is.
        trace_device: accepted; models are traced without memory, on no device.
        trace_execution_times: with several partitions, partition and schedule by the seconds that
            the operations of the model take, forward and backward, in place of their number. Rank
            0 times each different operation by itself, on the device that it trains on, when it
            is first met; that takes seconds, and the partition may differ from run to run. Whole
            passes are timed in the fourth step then, as on GPUs without replicas, unless
            ``torch.use_deterministic_algorithms(True)`` asks for the same bits in each run; those
            that follow may have another order.
        overlapping_allreduce: with ddp, reduce each bucket of gradients over the data-parallel
            ranks as soon as it is complete; False: all at the end of the step.
        backward_passes_per_step: step calls whose gradients are summed before they are reduced.
        average_grads_across_microbatches: divide summed gradients by the number of microbatches
            (the loss is a mean over the batch); False only sums.
        bucket_cap_mb: size of a bucket of gradients, in MiB.
        trace_memory_usage: partition by the memory of the activations that are kept for the
            backward pass, in place of that of all tensors that a forward pass makes.
        broadcast_buffers: with ddp, buffers follow the first rank of the DP_GROUP at each step.
        gradient_as_bucket_view: leave gradients in their buckets, which saves a copy of them; do
            not call ``detach_`` on such a gradient.
        find_unused_parameters: accepted; unused parameters are always found: one that has a
            gradient on some data-parallel ranks counts as zero on the others, and one that has
            none anywhere keeps none.

    Raises:
        TypeError: ``module`` is no ``torch.nn.Module``, or another argument has a wrong type.
        ValueError: a number is too small, or options exclude each other.
        ConfigError: the model is distributed already, with other options.

    Source: smd_model_parallel_pytorch.rst, DistributedModel.
    """

    def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Self:
        """Returns the model that there is, if it is distributed already."""
        models = models_of(slot.get()) if slot.is_filled else []
        found = (each for each in models if isinstance(each, cls) and each.is_made_of(module))
        return next(found, None) or super().__new__(cls)

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
        options = DataParallelOptions(
            overlapping_allreduce=overlapping_allreduce,
            backward_passes_per_step=backward_passes_per_step,
            average_grads_across_microbatches=average_grads_across_microbatches,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )
        tracing = TracingOptions(trace_execution_times, trace_memory_usage)
        if self.is_made_of(module):
            self.check_options(options, tracing)
        else:
            super().__init__(slot.together("smp.DistributedModel"), module, options, tracing)


class DistributedOptimizer(BaseOptimizer):
    """A torch optimizer over the parameters of a distributed model; use it like the wrapped one.

    Args:
        optimizer: the torch optimizer to wrap.
        static_loss_scale: under fp16, a fixed factor of the loss; None with a dynamic one.
        dynamic_loss_scale: under fp16, let the factor follow what is seen: a gradient that is not
            finite on any rank leaves the update out on all of them, and the factor falls.
        dynamic_loss_args: of a dynamic factor: ``init_scale`` (2**32), ``scale_factor`` (2),
            ``scale_window`` (1000), ``min_scale`` (1), ``delayed_shift`` (1),
            ``consecutive_hysteresis`` (False). Without fp16 all of these have no effect.
        dynamic_loss_kwargs: the same as keywords.

    Raises:
        TypeError: no ``torch.optim.Optimizer``; or under fp16, a dynamic argument of another name.
        ValueError: a parameter is in it twice; or under fp16, a static and a dynamic factor, or a
            number out of range.
        UnsupportedError: its update of one parameter needs the gradients of all.

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
        runtime = slot.get()
        if runtime.config.fp16:
            given = {**(dynamic_loss_args or {}), **dynamic_loss_kwargs}
            scale = options_of(static_loss_scale, dynamic_loss_scale, given)
            super().__init__(runtime, optimizer, scale)
        else:
            super().__init__(runtime, optimizer)
        tell_before_training(runtime)


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

    Shape: the norm is a scalar.

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
    slot.together("smp.clip_grad_norm_")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
