"""Compatibility: what scripts read of an optimizer whose parameters are in shards.

Source: published example scripts.
"""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


class ShardNames:
    """The part of ``DistributedOptimizer`` that has these names; only with sharded parameters."""

    _runtime: TorchRuntime
    param_groups: list[dict[str, Any]]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """What this rank updates, one tensor for each parameter group. They are copies."""
        self._need_shards("fp32_partitioned_groups_flat")
        return [
            torch.cat([each.detach().float().reshape(-1) for each in group["params"]])
            if group["params"]
            else torch.empty(0, device=self._runtime.device)
            for group in self.param_groups
        ]

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """The parameters that the script gave, by parameter group."""
        self._need_shards("fp16_groups")
        return self._groups()

    @property
    def ds_param_shard_group(self) -> torch.distributed.ProcessGroup:
        """Torch's group of the ranks that share parameters."""
        self._need_shards("ds_param_shard_group")
        assert self._runtime.sharding_groups is not None
        return self._runtime.sharding_groups.gathering

    def _groups(self) -> list[list[torch.Tensor]]:
        """Returns the parameters that the script gave, by parameter group."""
        raise NotImplementedError

    def _need_shards(self, name: str) -> None:
        if self._runtime.sharding_groups is None:
            raise AttributeError(f"there is {name} with sharded_data_parallel_degree above 1 only.")
