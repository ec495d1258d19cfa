"""What sharded data parallelism does to a model, and refuses of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.compiled import (
    backend_of,
    compiled_call,
    uses_cuda_graphs,
)
from smdistributed.modelparallel.torch.gradients.shards import Shards
from smdistributed.modelparallel.torch.model.compiled import CompiledModules
from smdistributed.modelparallel.torch.model.holder import Holder
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.compiled_calls import CompiledCalls
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter


def shard_parameters(runtime: TorchRuntime, holder: Holder, shards: Shards | None) -> None:
    """Cuts the parameters of this rank into shards, if so configured. Collective: DP_GROUP."""
    if shards is None:
        return
    holder.choose_sharded()

    def fill(parameter: nn.Parameter) -> None:
        if runtime.delayed.holds(parameter):
            runtime.delayed.fill(parameter, runtime.device)

    slices = dict.fromkeys(holder.sliced_names())
    shards.take(holder.named_sharded(), slices, fill)
    for module in holder.fakes.model.modules():
        if isinstance(module, nn.RNNBase):
            # On GPUs recurrent layers would lay their weights side by side, and ask where they are.
            module.flatten_parameters = _leave_apart  # type: ignore[method-assign]


def name_sizes(holder: Holder, shards: Shards | None) -> None:
    """Has parameters that are not in shards answer what scripts ask of all: of which size they are.

    Compatibility: small parameters stay whole, and those of other partitions are not here.
    """
    if shards is None:
        return
    for slot, fake in holder.fakes.slots.items():
        module, name = slot
        parameter: Any = module._parameters.get(name)
        if parameter is None or isinstance(parameter, ShardedParameter):
            continue
        own: Any = parameter.detach() if holder.holds(slot) else torch.empty(0)
        own.ds_numel = own.numel()
        parameter.ds_tensor = own
        parameter.ds_shape, parameter.ds_numel = fake.shape, fake.numel()


def _leave_apart() -> None:
    """Takes the place of a method that moves weights, where they are in shards."""


def follow_compiled(holder: Holder, compiled: CompiledModules, calls: CompiledCalls) -> None:
    """Takes what is compiled now, of a model with sharded parameters.

    Raises:
        UnsupportedError: it is compiled as CUDA graphs.
    """
    roots = [] if not holder.has_shards else list(compiled.roots)
    for module in roots:
        if uses_cuda_graphs(backend_of(compiled_call(module))):
            raise UnsupportedError(
                f"{holder.fakes.names[module] or 'the model'} is compiled as CUDA graphs, which "
                "read parameters where they were first; with sharded_data_parallel_degree above 1 "
                "they are gathered at other places each time: compile without mode="
                "'reduce-overhead' and 'max-autotune'."
            )
    calls.follow(roots)


def check_not_sharded(holder: Holder) -> None:
    """Raises if the whole of a model is asked for where each rank has shards of it.

    Raises:
        UnsupportedError: it is.
    """
    if holder.has_shards:
        raise UnsupportedError(
            "model.cpu() would need the whole model on every rank, which has shards of it: "
            "load state_dict() of the DistributedModel into a new model, or export a full "
            "checkpoint by smp.save_checkpoint(partial=False)."
        )
