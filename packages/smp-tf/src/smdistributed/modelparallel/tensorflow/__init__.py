"""Model parallelism for TensorFlow.

Use it as ``import smdistributed.modelparallel.tensorflow as smp``.
"""

from smdistributed.modelparallel.common.groups import CommGroup, RankType
from smdistributed.modelparallel.tensorflow.api.building import (
    DistributedModel,
    partition,
    register_post_partition_hook,
)
from smdistributed.modelparallel.tensorflow.api.checkpoints import CheckpointManager
from smdistributed.modelparallel.tensorflow.api.planning import plan
from smdistributed.modelparallel.tensorflow.api.start import facade, init
from smdistributed.modelparallel.tensorflow.api.training import (
    allreduce,
    broadcast_variables,
    clip_by_global_norm,
    step,
)
from smdistributed.modelparallel.tensorflow.stepping.output import StepOutput

is_initialized = facade.is_initialized
rank = facade.rank
size = facade.size
local_rank = facade.local_rank
local_size = facade.local_size
pp_rank = facade.pp_rank
pp_size = facade.pp_size
tp_rank = facade.tp_rank
tp_size = facade.tp_size
rdp_rank = facade.rdp_rank
rdp_size = facade.rdp_size
mp_rank = facade.mp_rank
mp_size = facade.mp_size
dp_rank = facade.dp_rank
dp_size = facade.dp_size
get_mp_group = facade.get_mp_group
get_dp_group = facade.get_dp_group
get_pp_group = facade.get_pp_group
get_tp_group = facade.get_tp_group
get_rdp_group = facade.get_rdp_group

send = facade.send
recv_from = facade.recv_from
broadcast = facade.broadcast
allgather = facade.allgather
barrier = facade.barrier
dp_barrier = facade.dp_barrier
mp_barrier = facade.mp_barrier
pp_barrier = facade.pp_barrier
tp_barrier = facade.tp_barrier
rdp_barrier = facade.rdp_barrier

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "clip_by_global_norm",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "get_pp_group",
    "get_rdp_group",
    "get_tp_group",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "plan",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "size",
    "step",
    "tp_barrier",
    "tp_rank",
    "tp_size",
]
