"""What moves tensors between the ranks of a tensor-parallel group: chosen when the job starts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.torch.collectives.copy_engine import CopyEngineCollectives
from smdistributed.modelparallel.torch.collectives.host_numbers import host_numbers
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.collectives.process_group import ProcessGroupCollectives
from smdistributed.modelparallel.torch.collectives.shapes import ShapesOfFakes
from smdistributed.modelparallel.torch.collectives.streams import ExchangeStream, OnOneStream
from smdistributed.modelparallel.torch.execute.peers import Peers
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.runtime.process_groups import new_group
from smdistributed.modelparallel.torch.runtime.readable_memory import readable_memory
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup


def build_tensor_group(
    settings: Config,
    topology: Topology,
    rank: int,
    peers: Peers,
    random: StepRandom,
    device: torch.device,
    timeout: timedelta,
) -> TensorGroup:
    """Returns the own tensor-parallel group, with connections that nothing else uses.

    Collective: WORLD.
    """
    own: dist.ProcessGroup | None = None
    members = topology.members(CommGroup.TP_GROUP, rank)
    if topology.tp_size > 1:
        with peers.connecting():
            for each in topology.groups(CommGroup.TP_GROUP):
                group = new_group(each, timeout)
                own = group if each == members else own
    if own is None:
        return TensorGroup()

    def blaming() -> contextlib.AbstractContextManager[object]:
        return peers.blaming(members, "exchanging activations with")

    host, backend = peers.hosts[rank], ProcessGroupCollectives(own, blaming)
    backend.numbers = host_numbers(
        backend, host, lambda: peers.are_there(members), timeout.total_seconds()
    )
    collectives: Collectives = backend
    stream = ExchangeStream(device)
    if device.type == "cuda":
        with stream.entered():
            collectives = _fastest(collectives, own, device, blaming, host, timeout)
    return TensorGroup(
        ShapesOfFakes(OnOneStream(collectives, stream)),
        random,
        is_prescaled=settings.prescaled_batch,
        keeps_gathered=settings.optimize == "speed",
        stream=stream,
    )


def _fastest(
    backend: Collectives,
    group: dist.ProcessGroup,
    device: torch.device,
    blaming: Callable[[], contextlib.AbstractContextManager[Any]],
    host: str,
    timeout: timedelta,
) -> Collectives:
    """Returns what exchanges tensors of GPUs the fastest here. Collective: TP_GROUP."""
    what = "tensor-parallel ranks exchange tensors"
    make = readable_memory(group, backend, device, host, timeout, what)
    if make is None:
        return backend
    synchronize = functools.partial(torch.cuda.synchronize, device)
    return CopyEngineCollectives(backend, make, device, synchronize, blaming)
