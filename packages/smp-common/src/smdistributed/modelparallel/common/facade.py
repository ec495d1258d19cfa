"""The part of the documented API that is the same in every framework: ranks and communication.

A framework package makes one ``Facade`` over its runtime slot and publishes its methods as module
functions. All of them raise ``NotInitializedError`` before ``smp.init``.

Source: smd_model_parallel_common_api.rst, MPI Basics and Communication API.
"""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.common.groups import CommGroup, RankType
from smdistributed.modelparallel.common.runtime import R, RuntimeSlot


class Facade:
    """Rank numbers, group members and object communication of this process.

    Args:
        slot: holds the runtime from ``smp.init`` on.
    """

    def __init__(self, slot: RuntimeSlot[R]) -> None:
        self._slot = slot

    def is_initialized(self) -> bool:
        """Tells whether ``smp.init`` has run in this process; callable at any time."""
        return self._slot.is_filled

    def rank(self) -> int:
        """Returns the global rank, 0 .. size-1."""
        return self._slot.get().transport.rank

    def size(self) -> int:
        """Returns the number of processes of the job."""
        return self._slot.get().transport.size

    def local_rank(self) -> int:
        """Returns the rank among the processes of this host; bind the device with it."""
        return self._slot.get().transport.local_rank

    def local_size(self) -> int:
        """Returns the number of processes on this host."""
        return self._slot.get().transport.local_size

    def pp_rank(self) -> int:
        """Returns the rank in the PP_GROUP: the partition that this process holds."""
        return self._slot.get().coordinates.pp_rank

    def pp_size(self) -> int:
        """Returns the number of ranks over which a pipeline is cut."""
        return self._slot.get().topology.pp_size

    def tp_rank(self) -> int:
        """Returns the rank in the TP_GROUP."""
        return self._slot.get().coordinates.tp_rank

    def tp_size(self) -> int:
        """Returns the number of ranks over which tensor-parallel modules are split."""
        return self._slot.get().topology.tp_size

    def rdp_rank(self) -> int:
        """Returns the rank in the RDP_GROUP."""
        return self._slot.get().coordinates.rdp_rank

    def rdp_size(self) -> int:
        """Returns the number of ranks with the same partition, slices and pieces of sequences."""
        return self._slot.get().topology.rdp_size

    def cp_rank(self) -> int:
        """Returns the rank in the CP_GROUP: which piece of each sequence this process has."""
        return self._slot.get().coordinates.cp_rank

    def cp_size(self) -> int:
        """Returns the number of ranks over which a sequence is split."""
        return self._slot.get().topology.cp_size

    def mp_rank(self) -> int:
        """Returns the rank in the MP_GROUP: the position in ``get_mp_group()``."""
        return self._slot.get().coordinates.mp_rank

    def mp_size(self) -> int:
        """Returns the number of ranks over which a model replica is spread."""
        return self._slot.get().topology.mp_size

    def dp_rank(self) -> int:
        """Returns the rank in the DP_GROUP; shard data and seed shuffling with it."""
        return self._slot.get().coordinates.dp_rank

    def dp_size(self) -> int:
        """Returns the number of ranks with the same partition and pieces of sequences."""
        return self._slot.get().topology.dp_size

    def get_mp_group(self) -> list[int]:
        """Returns the global ranks, ascending, over which this model replica is spread."""
        return self._members(CommGroup.MP_GROUP)

    def get_dp_group(self) -> list[int]:
        """Returns the global ranks, ascending, that hold this partition."""
        return self._members(CommGroup.DP_GROUP)

    def get_pp_group(self) -> list[int]:
        """Returns the global ranks, ascending, of this pipeline."""
        return self._members(CommGroup.PP_GROUP)

    def get_tp_group(self) -> list[int]:
        """Returns the global ranks, ascending, of this tensor-parallel group."""
        return self._members(CommGroup.TP_GROUP)

    def get_rdp_group(self) -> list[int]:
        """Returns the global ranks, ascending, with this partition and these slices."""
        return self._members(CommGroup.RDP_GROUP)

    def get_cp_group(self) -> list[int]:
        """Returns the global ranks, ascending, that share the sequences of this process."""
        return self._members(CommGroup.CP_GROUP)

    def send(self, obj: object, dest_rank: int, rank_type: RankType) -> None:
        """See ``Communicator.send``."""
        self._slot.get().communicator.send(obj, dest_rank, rank_type)

    def recv_from(self, src_rank: int, rank_type: RankType) -> Any:
        """See ``Communicator.recv_from``."""
        return self._slot.get().communicator.recv_from(src_rank, rank_type)

    def broadcast(self, obj: object, group: CommGroup) -> None:
        """See ``Communicator.broadcast``: called by the sender; the others call recv_from."""
        self._slot.get().communicator.broadcast(obj, group)

    def allgather(self, obj: object, group: CommGroup) -> list[Any]:
        """See ``Communicator.allgather``. Collective: every rank of ``group``."""
        return self._slot.get().communicator.allgather(obj, group)

    def barrier(self, group: CommGroup = CommGroup.WORLD) -> None:
        """See ``Communicator.barrier``. Collective: every rank of ``group``."""
        self._slot.get().communicator.barrier(group)

    def dp_barrier(self) -> None:
        """Same as ``barrier(smp.DP_GROUP)``."""
        self.barrier(CommGroup.DP_GROUP)

    def mp_barrier(self) -> None:
        """Same as ``barrier(smp.MP_GROUP)``."""
        self.barrier(CommGroup.MP_GROUP)

    def pp_barrier(self) -> None:
        """Same as ``barrier(smp.PP_GROUP)``."""
        self.barrier(CommGroup.PP_GROUP)

    def tp_barrier(self) -> None:
        """Same as ``barrier(smp.TP_GROUP)``."""
        self.barrier(CommGroup.TP_GROUP)

    def rdp_barrier(self) -> None:
        """Same as ``barrier(smp.RDP_GROUP)``."""
        self.barrier(CommGroup.RDP_GROUP)

    def _members(self, group: CommGroup) -> list[int]:
        runtime = self._slot.get()
        return list(runtime.topology.members(group, runtime.rank))
