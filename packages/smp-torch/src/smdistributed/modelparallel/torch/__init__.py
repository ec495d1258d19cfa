"""Model parallelism for PyTorch.

Use it as ``import smdistributed.modelparallel.torch as smp``.
"""

from smdistributed.modelparallel.common.importing import without_collector

with without_collector():
    from smdistributed.modelparallel.common.groups import CommGroup, RankType
    from smdistributed.modelparallel.torch import amp
    from smdistributed.modelparallel.torch import model as model
    from smdistributed.modelparallel.torch import nn as nn
    from smdistributed.modelparallel.torch import optimizers as optimizers
    from smdistributed.modelparallel.torch import patches as patches
    from smdistributed.modelparallel.torch.api.building import (
        delay_param_initialization,
        model_creation,
        partition,
        set_activation_checkpointing,
        set_partition,
    )
    from smdistributed.modelparallel.torch.api.checkpoints import (
        load,
        resume_from_checkpoint,
        save,
        save_checkpoint,
    )
    from smdistributed.modelparallel.torch.api.data import ElasticSampler
    from smdistributed.modelparallel.torch.api.groups import (
        get_cp_process_group,
        get_dp_process_group,
        get_mp_process_group,
        get_pp_process_group,
        get_rdp_process_group,
        get_tp_process_group,
        get_world_process_group,
    )
    from smdistributed.modelparallel.torch.api.memory import memory
    from smdistributed.modelparallel.torch.api.planning import plan
    from smdistributed.modelparallel.torch.api.slot import facade
    from smdistributed.modelparallel.torch.api.start import init
    from smdistributed.modelparallel.torch.api.tensor_parallel import (
        hvd_average_grads,
        set_tensor_parallelism,
        tensor_parallelism,
        tp_register,
        tp_register_with_module,
    )
    from smdistributed.modelparallel.torch.api.training import (
        DistributedModel,
        DistributedOptimizer,
        clip_grad_norm_,
        is_tracing,
        step,
    )
    from smdistributed.modelparallel.torch.state_mod import state
    from smdistributed.modelparallel.torch.stepping.output import StepOutput

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
cp_rank = facade.cp_rank
cp_size = facade.cp_size
mp_rank = facade.mp_rank
mp_size = facade.mp_size
dp_rank = facade.dp_rank
dp_size = facade.dp_size
get_mp_group = facade.get_mp_group
get_dp_group = facade.get_dp_group
get_pp_group = facade.get_pp_group
get_tp_group = facade.get_tp_group
get_rdp_group = facade.get_rdp_group
get_cp_group = facade.get_cp_group

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
CP_GROUP = CommGroup.CP_GROUP

__all__ = [
    "CP_GROUP",
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "ElasticSampler",
    "RankType",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "cp_rank",
    "cp_size",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_cp_group",
    "get_cp_process_group",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "hvd_average_grads",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "memory",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "patches",
    "plan",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "size",
    "state",
    "step",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]
