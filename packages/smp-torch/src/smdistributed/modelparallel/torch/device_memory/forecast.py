"""What training needs besides parameters and activations, before there has been an update."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor
from smdistributed.modelparallel.torch.device_memory.held import bytes_in_optimizer
from smdistributed.modelparallel.torch.device_memory.kinds import GRADIENTS, OPTIMIZER
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.optimizer.kept_state import kept_bytes
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter, held

#: Sums of shards are in single precision.
_SINGLE_BYTES = 4


def expected(runtime: TorchRuntime) -> dict[str, int]:
    """Returns the bytes of gradients and of what optimizers keep, on this rank.

    Nothing of models that have no place yet, and of optimizers nothing once one has made an update:
    then there is what it keeps.

    Args:
        runtime: the state of the library in this process.
    """
    models = [model for model in models_of(runtime) if model.partitioned]
    if not models or not runtime.live_optimizers():
        return {}
    updates: dict[int, bool] = {}
    gradients = 0.0
    for model in models:
        copies = 1
        if (
            runtime.topology.dp_cp_size > 1
            and not model.data_parallel.options.gradient_as_bucket_view
        ):
            copies = 2  # one of them is a bucket
        for parameter, is_own in model.data_parallel.updates().items():
            here = held(parameter)
            updates[id(parameter)] = updates[id(here)] = is_own
            if parameter.requires_grad:
                if isinstance(parameter, ShardedParameter):
                    gradients += here.numel() * _SINGLE_BYTES
                else:
                    gradients += copies * here.numel() * here.element_size()
    optimizers = [each.optimizer for each in runtime.live_optimizers()]
    if any(each.state for each in optimizers):
        return {GRADIENTS: round(gradients)}
    kept, _, _ = kept_bytes(runtime, tries=is_torchs)
    optimizer = sum(
        _kept_for(each, kept.get(id(each), 0.0), updates)
        for one in optimizers
        for group in one.param_groups
        for each in group["params"]
    )
    return {GRADIENTS: round(gradients), OPTIMIZER: round(optimizer)}


def _kept_for(tensor: torch.Tensor, kept: float, updates: Mapping[int, bool]) -> float:
    """Returns what is kept for a tensor that an optimizer updates.

    Args:
        tensor: a parameter, the block of one, or a master.
        kept: for all of it.
        updates: whether this rank updates parameters, by the identities of those that it has, and
            of their blocks.
    """
    if id(tensor) in updates:
        here = held(tensor).numel()
        return kept * here / tensor.numel() if updates[id(tensor)] and here else 0.0
    if isinstance(tensor, AbsentTensor):
        return 0.0
    return kept + bytes_in_optimizer(tensor)


def is_torchs(optimizer: object) -> bool:
    """Whether the update of an optimizer is PyTorch's, which changes nothing but what it is given.

    Code of others might, as by a counter of its own, and is not run for a forecast.
    """
    return type(optimizer).__module__.split(".", 1)[0] == "torch"
