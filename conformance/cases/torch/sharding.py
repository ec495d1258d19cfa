"""PyTorch: sharded data parallelism, by what its parameters do."""

from __future__ import annotations

from typing import Any

from conformance.adapters.base import WIDTH
from conformance.cases.torch.checkpoints import shared_folder
from conformance.registry import torch_case

EXAMPLES = 16
SHARDS = ("shards",)


def _made(adapter: Any) -> tuple[Any, Any]:
    import torch

    model = adapter.model()
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, adapter.smp.DistributedOptimizer(plain)


def _stepped(adapter: Any, model: Any) -> None:
    @adapter.smp.step
    def train(model: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    size, rank = adapter.smp.dp_size(), adapter.smp.dp_rank()
    train(model, adapter.tensor(adapter.batch(EXAMPLES)).chunk(size)[rank])


def _weights(model: Any) -> list[Any]:
    return [each for name, each in model.local_named_parameters() if name.endswith("weight")]


@torch_case(
    "torch.sharded_data_parallel",
    "config.sharded_data_parallel_degree",
    "config.sdp_gradient_clipping",
    worlds=SHARDS,
)
def training_in_shards_is_that_of_one_process(adapter: Any) -> None:
    import torch

    model, optimizer = _made(adapter)
    plain = adapter.net().to(adapter.device)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    bound = adapter.config.sdp_gradient_clipping
    for _ in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        _stepped(adapter, model)
        plain(adapter.tensor(adapter.batch(EXAMPLES))).square().mean().backward()
        found = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), bound)
        assert want > bound
        torch.testing.assert_close(found.cpu(), want.cpu(), rtol=1e-5, atol=0)
        optimizer.step()
        reference.step()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


@torch_case("ranks.sharding_groups", "compat.sharded_parameter_attributes", worlds=SHARDS)
def consecutive_ranks_have_the_blocks_of_a_parameter(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    model, optimizer = _made(adapter)
    want = adapter.net().state_dict()
    for name, parameter in model.local_named_parameters():
        if not name.endswith("weight"):
            continue
        assert parameter.ds_shape == (WIDTH, WIDTH)
        assert parameter.ds_numel == WIDTH * WIDTH
        block = parameter.ds_tensor
        assert block.ds_numel == block.numel() == WIDTH * WIDTH // 2
        blocks = smp.allgather(block.cpu(), smp.DP_GROUP)
        for first in (0, 2):
            torch.testing.assert_close(torch.cat(blocks[first : first + 2]), want[name])
    (flat,) = optimizer.fp32_partitioned_groups_flat
    assert flat.dtype is torch.float32
    assert flat.numel() == sum(
        each.numel() for group in optimizer.param_groups for each in group["params"]
    )
    assert [len(group) for group in optimizer.fp16_groups] == [len(list(model.parameters()))]
    assert torch.distributed.get_world_size(optimizer.ds_param_shard_group) == 2


@torch_case(
    "config.sdp_param_persistence_threshold", "compat.sharded_parameter_attributes", worlds=SHARDS
)
def small_parameters_stay_whole(adapter: Any) -> None:
    threshold = adapter.config.sdp_param_persistence_threshold
    model, _ = _made(adapter)
    kinds = set()
    for parameter in model.parameters():
        is_small = parameter.numel() < threshold
        kinds.add(is_small)
        assert parameter.ds_numel == parameter.numel()
        assert (parameter.ds_tensor.ds_numel == parameter.ds_numel) is is_small
        if is_small:
            assert parameter.detach().isfinite().all()
    assert kinds == {True, False}


@torch_case("config.sdp_max_live_parameters", worlds=SHARDS)
def no_more_is_gathered_than_allowed(adapter: Any) -> None:
    model, _ = _made(adapter)
    limit = adapter.config.sdp_max_live_parameters
    assert sum(each.numel() for each in _weights(model)) > limit
    for _ in range(2):  # the second step knows the order, and gathers ahead
        _stepped(adapter, model)
    most = model.data_parallel.shards.model.residency.most_live
    assert WIDTH * WIDTH <= most <= limit
    assert model.data_parallel.shards.model.residency.live == 0


@torch_case("config.sdp_reduce_bucket_size", worlds=SHARDS)
def gradients_travel_in_buckets(adapter: Any) -> None:
    from unittest import mock

    import torch.distributed as dist

    model, _ = _made(adapter)
    sent = []
    exchange = dist.batch_isend_irecv

    def note(operations: Any) -> Any:
        sent.append(sum(each.tensor.numel() for each in operations if each.op is dist.isend))
        return exchange(operations)

    with mock.patch.object(dist, "batch_isend_irecv", note):
        _stepped(adapter, model)
    assert 0 < max(sent) <= adapter.config.sdp_reduce_bucket_size
    degree = adapter.config.sharded_data_parallel_degree
    of_others = sum(each.numel() for each in _weights(model)) * (degree - 1) / degree
    assert sum(sent) >= 2 * of_others  # two microbatches


@torch_case("smp.save_checkpoint", "smp.resume_from_checkpoint", worlds=SHARDS)
def shards_are_saved_and_come_back(adapter: Any) -> None:
    smp = adapter.smp
    folder = shared_folder(adapter)
    model, optimizer = _made(adapter)
    _stepped(adapter, model)
    optimizer.step()
    smp.save_checkpoint(folder, "one", model=model, optimizer=optimizer)
    want, settled = dict(model.state_dict()), optimizer.state_dict()
    other, its_optimizer = _made(adapter)
    smp.resume_from_checkpoint(folder, model=other, optimizer=its_optimizer)
    for name, value in other.state_dict().items():
        assert value.equal(want[name]), name
    for number, values in its_optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert value.equal(settled["state"][number][key])
    smp.resume_from_checkpoint(
        folder, model=other, optimizer=its_optimizer, load_sharded_optimizer_state=False
    )
    assert not its_optimizer.state_dict()["state"]
    smp.barrier()
