"""What to change where memory is not enough, with what each change would free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.torch.device_memory.kinds import (
    ACTIVATIONS,
    CAPTURED,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    OUTSIDE,
    PARAMETERS,
    UNUSED,
)
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport, text_of
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

_MOST = 4
#: What is smaller than this part of what is in use is not worth a line.
_LEAST_PART = 0.05
#: The driver's context, kernels and NCCL.
_USUALLY_OUTSIDE = 2 << 30
#: Torch raises no class of its own where a host has no memory left.
_OF_A_HOST = "DefaultCPUAllocator: can't allocate memory"


class Change(NamedTuple):
    """Something that frees memory.

    Attributes:
        num_bytes: of this rank, about.
        words: what to do.
    """

    num_bytes: float
    words: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or its host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OF_A_HOST in str(error)


def explanation(report: MemoryReport, runtime: TorchRuntime) -> str:
    """Returns where the memory of a rank is, and what frees most of it, as lines of text.

    Args:
        report: what its device holds.
        runtime: the state of the library in this process.
    """
    found = sorted(changes(report, runtime), reverse=True)
    worth = [each for each in found if each.num_bytes >= _LEAST_PART * report.total]
    lines = [f"  - {each.words} (about {text_of(each.num_bytes)})" for each in worth[:_MOST]]
    told = ["What frees memory on this rank:", *lines] if lines else []
    return "\n".join(["", str(report), *told, ""])


def changes(report: MemoryReport, runtime: TorchRuntime) -> Iterator[Change]:
    """Yields what frees memory of a rank, as its job is configured."""
    config, topology = runtime.config, runtime.topology
    sizes = {kind: max(size, report.expected.get(kind, 0)) for kind, size in report.kinds.items()}
    in_use = sizes[OTHER] + sizes.get(CAPTURED, 0)
    passing = float(max(in_use, report.expected.get(ACTIVATIONS, 0)))
    state = float(sizes[PARAMETERS] + sizes[GRADIENTS] + sizes[OPTIMIZER])
    yield from _of_activations(passing, config, topology)
    yield from _of_state(state, float(sizes[OPTIMIZER]), config, topology)
    yield Change(
        float(sizes.get(UNUSED, 0)),
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
    )
    others = sizes.get(OUTSIDE, 0) - _USUALLY_OUTSIDE
    yield Change(max(0.0, float(others)), "other processes that use this device: end them")


def _of_activations(passing: float, config: Config, topology: Topology) -> Iterator[Change]:
    """Yields what makes activations smaller.

    Args:
        passing: bytes of what is no state of the model.
        config: of the job.
        topology: of its ranks.
    """
    microbatches, in_flight = config.microbatches, config.active_microbatches
    yield Change(
        passing / 2,
        f"microbatches: {2 * microbatches} in place of {microbatches}, each half as large",
    )
    if not config.checkpointed_blocks:
        yield Change(
            0.6 * passing,
            "activation checkpointing: checkpointed_blocks: 1, or "
            "smp.set_activation_checkpointing of modules",
        )
    elif not config.offload_activations:
        yield Change(0.5 * passing, "offload_activations: True, for what is checkpointed")
    alive = min(in_flight, microbatches)
    if 1 < topology.pp_size < alive:
        yield Change(
            passing * (1 - topology.pp_size / alive),
            f"active_microbatches: {topology.pp_size} in place of {in_flight}",
        )
    if not (config.bf16 or config.fp16):
        yield Change(passing / 2, "half precision: bf16: True")


def _of_state(
    state: float, optimizer: float, config: Config, topology: Topology
) -> Iterator[Change]:
    """Yields what makes parameters, gradients and what optimizers keep smaller.

    Args:
        state: bytes of all three.
        optimizer: of what optimizers keep.
        config: of the job.
        topology: of its ranks.
    """
    replicas, degree = topology.rdp_cp_size, config.sharded_data_parallel_degree
    if degree < replicas:
        yield Change(
            state * (1 - degree / replicas),
            f"shards: sharded_data_parallel_degree: {replicas} in place of {degree}",
        )
    if replicas > 1 and degree == 1 and not config.shard_optimizer_state:
        yield Change(
            optimizer * (1 - 1 / replicas),
            "shard_optimizer_state: True, which shares it over the replicas",
        )
    yield Change(
        state / 2,
        f"pipeline_parallel_degree: {2 * topology.pp_size} in place of {topology.pp_size}, on "
        "twice as many devices",
    )
