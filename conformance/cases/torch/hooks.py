"""PyTorch: hooks of a model, replicas that join, and reductions of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.cases.torch.model import SPLIT, mean_square, trained, wanted_gradients
from conformance.registry import torch_case


@torch_case("smp.DistributedModel.register_post_partition_hook", worlds=SPLIT)
def hooks_run_once_after_the_partition(adapter: Any) -> None:
    model = adapter.model()
    seen: list[object] = []

    def two(given: Any, optimizer: Any) -> None:
        assert given.partitioned
        seen.append((given is model, optimizer))

    model.register_post_partition_hook(lambda: seen.append("none"))
    model.register_post_partition_hook(two)
    model.register_post_partition_hook(lambda: seen.append("removed")).remove()
    assert not seen
    trained(adapter, model)
    trained(adapter, model)
    assert seen[0] == "none"
    assert seen[1][0] is True  # type: ignore[index]
    assert len(seen) == 2
    with pytest.raises(TypeError, match="callable"):
        adapter.model().register_post_partition_hook(3)
    with pytest.warns(UserWarning, match="partition"):
        model.register_post_partition_hook(lambda: seen.append("late"))


@torch_case("compat.register_post_step_hook", worlds=SPLIT)
def a_post_step_hook_runs_after_the_first_step(adapter: Any) -> None:
    model = adapter.model()
    seen: list[bool] = []
    model.register_post_step_hook(lambda given, optimizer: seen.append(given is model))
    for _ in range(2):
        trained(adapter, model)
    assert seen == [True]


@torch_case("smp.DistributedModel.cpu", worlds=SPLIT)
def cpu_gathers_the_whole_model(adapter: Any) -> None:
    import torch

    model, _ = trained(adapter)
    assert model.cpu() is model
    for name, tensor in adapter.net().state_dict().items():
        got = dict(model.get_module().state_dict())[name]
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, tensor)


@torch_case("smp.DistributedModel.join", worlds=("replicas",))
def replicas_may_have_different_numbers_of_batches(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    model = adapter.model()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(mean_square)
    with model.join():
        for number in range(1 + smp.dp_rank()):
            optimizer.zero_grad()
            step(model, adapter.tensor(adapter.batch(8, seed=number)))
            optimizer.step()
    states = smp.allgather({n: p.detach() for n, p in model.local_named_parameters()}, smp.WORLD)
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name])


@torch_case("smp.DistributedModel.join", worlds=("pipeline",))
def join_needs_ddp(adapter: Any) -> None:
    with pytest.raises(RuntimeError, match="ddp"), adapter.model().join():
        pass


@torch_case("smp.DistributedModel.register_comm_hook", worlds=("replicas", "both"))
def a_hook_reduces_in_place_of_the_library(adapter: Any) -> None:
    import torch
    import torch.distributed as dist

    smp = adapter.smp
    model = adapter.model()

    def halve(group: Any, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        # The hook averages over replicas and microbatches by itself.
        return work.then(lambda done: done.value()[0] / smp.dp_size() / 4 / 2)

    model.register_comm_hook(smp.get_dp_process_group(), halve)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name] / 2)


@torch_case(
    "smp.DistributedModel(overlapping_allreduce)",
    "smp.DistributedModel.register_comm_hook",
    worlds=("pipeline",),
)
def a_hook_needs_ddp(adapter: Any) -> None:
    with pytest.raises(RuntimeError, match="ddp"):
        adapter.model().register_comm_hook(None, lambda state, bucket: None)
