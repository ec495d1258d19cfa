"""The tensors that the models and optimizers of a process hold, by kind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.symmetric import windows
from smdistributed.modelparallel.torch.device_memory.kinds import (
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    WINDOWS,
)
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.precision.split_master import SplitMaster
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.parameter import gradient_here, held
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

#: Others stand for tensors that lie elsewhere, or are a script's own: these have no kind.
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
#: A kind, the address of its first byte, and the address behind its last one.
Span = tuple[str, int, int]


def spans(runtime: TorchRuntime) -> Iterator[Span]:
    """Yields where tensors of known kinds lie on the device of a process.

    What lies in the memory of another kind, as a gradient in a bucket, comes after it or before it.

    Args:
        runtime: the state of the library in this process.
    """
    for kind, tensor in _tensors(runtime):
        if type(tensor) in _PLAIN and _is_here(tensor, runtime.device):
            # Of a view the part that it sees: windows that others read are one piece for many.
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes:
                yield kind, tensor.data_ptr(), tensor.data_ptr() + num_bytes


def _is_here(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.layout is torch.strided


def bytes_in_optimizer(tensor: torch.Tensor) -> int:
    """Returns what a tensor that an optimizer updates takes, where it is none of a model."""
    here = _memory_of(tensor)
    return here.numel() * here.element_size()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what is here of a tensor that an optimizer updates, as a tensor with memory."""
    if isinstance(tensor, SplitMaster) and tensor.rest is not None:
        return tensor.rest
    found: torch.Tensor = held(tensor)
    return found


def _tensors(runtime: TorchRuntime) -> Iterator[tuple[str, torch.Tensor]]:
    for model in models_of(runtime):
        was_at_rest = model.wake()
        try:
            yield from _of_model(model)
        finally:
            if was_at_rest:
                model.rest()
    for each in runtime.live_optimizers():
        yield from ((OPTIMIZER, tensor) for tensor in _of_optimizer(each.optimizer))
    yield from ((WINDOWS, tensor) for tensor in windows())


def _of_model(model: DistributedModel) -> Iterator[tuple[str, torch.Tensor]]:
    module, shards = model.get_module(), model.data_parallel.shards
    parameters = model.local_parameters() if model.partitioned else module.parameters()
    buffers = model.local_buffers() if model.partitioned else module.buffers()
    for parameter in parameters:
        yield PARAMETERS, held(parameter)
        gradient = gradient_here(parameter)
        if gradient is not None:
            yield GRADIENTS, gradient
    yield from ((PARAMETERS, buffer) for buffer in buffers)
    yield from ((GRADIENTS, tensor) for tensor in model.data_parallel.gradient_memory())
    if shards is not None:
        yield from ((GATHERED, tensor) for tensor in shards.model.residency.gathered())


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for each in group["params"]:
            yield _memory_of(each)  # where it is a parameter of the model, it is counted there
    yield from tensors_in(list(optimizer.state.values()))
