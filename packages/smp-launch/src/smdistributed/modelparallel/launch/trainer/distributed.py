"""What starts the processes of a ``ModelTrainer``'s job.

Source: the public classes of the service's SDK, version 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import BaseModel, ConfigDict

from smdistributed.modelparallel.launch.job import trainer
from smdistributed.modelparallel.launch.trainer.configs import Checked

__all__ = ["MPI", "SMP", "DistributedConfig", "Torchrun"]


class SMP(Checked, BaseModel):
    """Parameters of version 2 of the library, of which this one has some; others are refused.

    Pipelines and microbatches are parameters of this one alone: ``SM_HP_MP_PARAMETERS`` among the
    variables of the job has them as JSON, or the script gives them to ``smp.init``.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    hybrid_shard_degree: int | None = None
    sm_activation_offloading: bool | None = None
    activation_loading_horizon: int | None = None
    fsdp_cache_flush_warnings: bool | None = None
    allow_empty_shards: bool | None = None
    tensor_parallel_degree: int | None = None
    context_parallel_degree: int | None = None
    expert_parallel_degree: int | None = None
    random_seed: int | None = None


class DistributedConfig(Checked, BaseModel, ABC):
    """What starts the processes: one of those below, or a program of one's own."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    @property
    @abstractmethod
    def driver_dir(self) -> str:
        """The folder of the program."""

    @property
    @abstractmethod
    def driver_script(self) -> str:
        """The program in it; what this object holds is its ``SM_DISTRIBUTED_CONFIG``."""


class _Known(DistributedConfig):
    """A program that is not run here, but what it would start."""

    @property
    def driver_dir(self) -> str:
        """No folder: the program is not needed."""
        return ""


class Torchrun(_Known):
    """``torchrun`` on each host.

    Attributes:
        process_count_per_node: its processes; default one for each GPU.
        smp: parameters of model parallelism.
    """

    process_count_per_node: int | None = None
    smp: SMP | None = None

    @property
    def driver_script(self) -> str:
        """The name of the SDK's program."""
        return trainer.TORCHRUN


class MPI(_Known):
    """``mpirun`` over all hosts, by ``smprun``.

    Attributes:
        process_count_per_node: the processes of a host; default one for each GPU.
        mpi_additional_options: more words of the command line.
    """

    process_count_per_node: int | None = None
    mpi_additional_options: list[str] | None = None

    @property
    def driver_script(self) -> str:
        """The name of the SDK's program."""
        return trainer.MPI
