"""Torch's groups carry tensors of the host, whoever made the group of the world."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.runtime.process_groups import new_group, serves_host


def test_groups_in_a_world_for_gpus_alone() -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert not serves_host(dist.group.WORLD)
        group = new_group([0], timedelta(seconds=10))
        assert serves_host(group)
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
