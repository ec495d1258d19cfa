"""What training needs besides parameters and activations, before there has been an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor
from smdistributed.modelparallel.torch.device_memory.held import bytes_in_optimizer, spans
from smdistributed.modelparallel.torch.device_memory.kinds import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
)
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.optimizer.kept_state import kept_bytes
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter, held

#: Sums of shards are in single precision.
_SINGLE_BYTES = 4
#: Of gradients of shards, that are there at a time.
_PARCELS = 4


def expected(runtime: TorchRuntime) -> dict[str, int]:
    """Returns the bytes that training takes of some kinds, on this rank.

    Of gradients and of what optimizers keep nothing while models have no place yet, and of
    optimizers nothing once one has made an update: then there is what it keeps. Of activations
    nothing before a step is recorded.

    Args:
        runtime: the state of the library in this process.
    """
    found = _of_state(runtime)
    if runtime.passes.ranks:
        held = runtime.passes.ranks[runtime.coordinates.pp_rank]
        found[ACTIVATIONS] = round(held.total)
        if gathered := _gathered(runtime):
            found[GATHERED] = gathered
    return found


def _gathered(runtime: TorchRuntime) -> int:
    """Returns the bytes that come and go with shards, on this rank, at most.

    These are the parameters that are gathered, and gradients in parcels: as they are made, as they
    are sent, and as they come, into two buffers in turn.
    """
    config, total = runtime.config, 0
    for model in models_of(runtime):
        shards = model.data_parallel.shards
        sizes = [] if shards is None else [(each.numel(), each) for each in shards.parameters()]
        if not sizes:
            continue
        elements = sum(size for size, _ in sizes)
        a_number = max(each.element_size() for _, each in sizes)
        gathered = min(elements, config.sdp_max_live_parameters)
        trained = sum(size for size, each in sizes if each.requires_grad)
        total += a_number * (gathered + _PARCELS * min(trained, config.sdp_reduce_bucket_size))
    return round(total)


def by_rank(runtime: TorchRuntime) -> list[RankMemory]:
    """Returns what training takes on each rank of this process's pipeline.

    Here it is known what gradients and optimizer take for each number; elsewhere that is taken to
    be as much. A step has been recorded.

    Args:
        runtime: the state of the library in this process.
    """
    here, own = runtime.coordinates.pp_rank, _of_state(runtime)
    if runtime.topology.pp_size == 1:
        parameters = sum(end - start for kind, start, end in spans(runtime) if kind == PARAMETERS)
        [held] = runtime.passes.ranks
        state = own.get(GRADIENTS, 0), own.get(OPTIMIZER, 0)
        transfers = held.transfers + _gathered(runtime)
        return [RankMemory(parameters, *state, held.activations, transfers)]
    sizes = _sizes(runtime)
    trained = sizes[here].trained or 1
    found = []
    for rank, held in enumerate(runtime.passes.ranks):
        share = sizes[rank].trained / trained
        found.append(
            RankMemory(
                sizes[rank].all,
                share * own.get(GRADIENTS, 0),
                share * own.get(OPTIMIZER, 0),
                held.activations,
                held.transfers,
            )
        )
    return found


class _Sizes(NamedTuple):
    """Bytes of the parameters and buffers of a partition, and of those that train."""

    all: int
    trained: int


def _sizes(runtime: TorchRuntime) -> list[_Sizes]:
    sizes = [_Sizes(0, 0)] * runtime.topology.pp_size
    for model in models_of(runtime):
        if not model.partitioned:
            continue
        placement = model.placement
        slots = {id(fake): (slot, fake) for slot, fake in model.holder.fakes.slots.items()}
        for slot, fake in slots.values():
            rank, size = placement.owner_of(slot), fake.numel() * fake.element_size()
            before = sizes[rank]
            trained = size if fake.requires_grad else 0
            sizes[rank] = _Sizes(before.all + size, before.trained + trained)
    return sizes


def _of_state(runtime: TorchRuntime) -> dict[str, int]:
    """Returns the bytes of gradients and of what optimizers keep."""
    models = [model for model in models_of(runtime) if model.partitioned]
    if not models or not runtime.live_optimizers():
        return {}
    updates: dict[int, bool] = {}
    gradients = 0.0
    for model in models:
        copied = model.data_parallel.copied_gradients()
        for parameter, is_own in model.data_parallel.updates().items():
            here = held(parameter)
            updates[id(parameter)] = updates[id(here)] = is_own
            if parameter.requires_grad:
                if isinstance(parameter, ShardedParameter):
                    gradients += here.numel() * _SINGLE_BYTES
                else:
                    copies = 1 + (parameter in copied)
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
