"""The public functions of the PyTorch package, bound to the runtime of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.errors import NotInitializedError
from smdistributed.modelparallel.common.facade import Facade
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.runtime import RuntimeSlot
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
