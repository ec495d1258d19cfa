"""Compatibility: merging checkpoints of sharded data parallelism, which is not there yet."""

from smdistributed.modelparallel.torch.compat.later import later_function

get_full_state_dict_from_sharded_data_parallel_checkpoint = later_function(
    "get_full_state_dict_from_sharded_data_parallel_checkpoint"
)

__all__ = ["get_full_state_dict_from_sharded_data_parallel_checkpoint"]
