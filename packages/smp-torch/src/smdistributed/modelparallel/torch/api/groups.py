"""torch's process groups of the job."""

from __future__ import annotations

import torch.distributed as dist

from smdistributed.modelparallel.common.errors import (
    NotInitializedError,
)
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.api.slot import slot


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


def get_cp_process_group() -> dist.ProcessGroup:
    """Returns torch's group of the ranks that share sequences. Needs ``ddp: True``.

    An addition of this library, see ``context_parallel_degree``.
    """
    return _process_group(CommGroup.CP_GROUP)


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
