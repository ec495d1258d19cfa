"""PyTorch: half precision, loss scaling and sharded optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conformance.adapters.base import WIDTH
from conformance.cases.torch.checkpoints import shared_folder
from conformance.registry import torch_case
from smdistributed.modelparallel.common.errors import UnsupportedError

EXAMPLES = 8


def _optimizer(adapter: Any, model: Any, **options: Any) -> Any:
    import torch

    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return adapter.smp.DistributedOptimizer(plain, **options)


def _share(adapter: Any) -> Any:
    """Returns the examples of this replica."""
    return adapter.tensor(adapter.batch(EXAMPLES)).chunk(adapter.smp.dp_size())[
        adapter.smp.dp_rank()
    ]


def _stepped(adapter: Any, model: Any) -> None:
    @adapter.smp.step
    def train(model: Any, x: Any) -> Any:
        loss = model(x).float().square().mean()
        model.backward(loss)
        return loss

    train(model, _share(adapter))


def _plain_loop(
    adapter: Any, dtype: Any, scale: float, steps: int, max_norm: float | None = None
) -> Any:
    """Trains in half precision with the same arithmetic, written out; returns the module."""
    import torch

    size, number = adapter.smp.dp_size(), adapter.config.microbatches
    nets = [adapter.net().to(adapter.device, dtype) for _ in range(size)]
    masters = [torch.nn.Parameter(each.detach().float()) for each in nets[0].parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.5, momentum=0.9)
    for _ in range(steps):
        for net, share in zip(
            nets, adapter.tensor(adapter.batch(EXAMPLES)).chunk(size), strict=True
        ):
            net.zero_grad()
            for part in share.chunk(number):
                loss = net(part.to(dtype)).float().square().mean()
                loss.backward(torch.full_like(loss, scale / number))
        for master, *copies in zip(masters, *(net.parameters() for net in nets), strict=True):
            parts = [each.grad / size for each in copies]
            master.grad = sum(parts[1:], parts[0]).float() * (1 / scale)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        for net in nets:
            for parameter, master in zip(net.parameters(), masters, strict=True):
                parameter.data.copy_(master)
    return nets[0]


def _is_that_of(model: Any, plain: Any) -> None:
    want = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert parameter.dtype is want[name].dtype
        assert parameter.equal(want[name]), name


@torch_case("config.fp16", "FP16_Optimizer", worlds=("half",))
def fp16_is_a_plain_loop_with_masters_in_fp32(adapter: Any) -> None:
    import torch

    model = adapter.model()
    optimizer = _optimizer(adapter, model, static_loss_scale=256.0)
    for _ in range(4):
        optimizer.zero_grad()
        _stepped(adapter, model)
        optimizer.step()
    _is_that_of(model, _plain_loop(adapter, torch.float16, 256.0, 4))
    assert type(optimizer.fp16_optimizer).__name__ == "FP16_Optimizer"
    held = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
    assert {each.dtype for each in held} == {torch.float32}


@torch_case("config.bf16", worlds=("brain",))
def bf16_needs_no_loss_scale(adapter: Any) -> None:
    import torch

    model = adapter.model()
    optimizer = _optimizer(adapter, model)
    for _ in range(4):
        optimizer.zero_grad()
        _stepped(adapter, model)
        optimizer.step()
    _is_that_of(model, _plain_loop(adapter, torch.bfloat16, 1.0, 4))
    assert not optimizer.overflow


@torch_case("FP16_Module", worlds=("half", "brain"))
def models_are_cast_and_their_inputs_too(adapter: Any) -> None:
    import torch

    model = adapter.model()
    dtype = torch.float16 if adapter.config.fp16 else torch.bfloat16
    assert type(model.module.module).__name__ == "FP16_Module"
    assert model.module.module.module is model.get_module()
    assert {each.dtype for each in (*model.parameters(), *model.buffers())} == {dtype}

    @adapter.smp.step
    def outputs(model: Any, x: Any) -> Any:
        return model(x)

    assert outputs(model, _share(adapter)).concat().dtype is dtype


@torch_case(
    "smp.DistributedOptimizer.clip_master_grads",
    "compat.clip_master_grads_and_overflow",
    worlds=("half",),
)
def master_gradients_are_clipped_to_the_norm_of_the_model(adapter: Any) -> None:
    import torch

    model = adapter.model()
    optimizer = _optimizer(adapter, model, static_loss_scale=256.0)
    for _ in range(3):
        optimizer.zero_grad()
        _stepped(adapter, model)
        assert optimizer.clip_master_grads(0.01) > 0.01
        optimizer.step()
    _is_that_of(model, _plain_loop(adapter, torch.float16, 256.0, 3, max_norm=0.01))


@torch_case("compat.clip_master_grads_and_overflow", "FP16_Optimizer", worlds=("half",))
def an_overflow_on_one_rank_skips_the_update_on_all(adapter: Any) -> None:
    smp = adapter.smp
    model = adapter.model()
    scaling = {"init_scale": 64.0, "scale_window": 2}
    optimizer = _optimizer(
        adapter,
        model,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args=scaling,
    )
    seen = []
    for number in range(4):
        optimizer.zero_grad()
        _stepped(adapter, model)
        before = [each.detach().clone() for each in model.local_parameters()]
        if number == 1 and smp.rank() == 1:
            next(model.local_parameters()).grad.fill_(float("inf"))
        optimizer.step()
        stayed = all(map(lambda one, two: one.equal(two), before, model.local_parameters()))
        assert optimizer.step_was_skipped is stayed
        seen.append((optimizer.overflow, stayed, optimizer.loss_scale))
    assert seen == [
        (False, False, 64.0),
        (True, True, 32.0),
        (False, False, 32.0),
        (False, False, 64.0),
    ]


@torch_case("config.fp16_params", worlds=("new",))
def fp16_params_concerns_distributed_modules_alone(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    smp.init({"pipeline_parallel_degree": 1, "fp16_params": True})
    split = smp.nn.DistributedLinear(WIDTH, WIDTH)
    model = smp.DistributedModel(torch.nn.ModuleList([split, torch.nn.Linear(WIDTH, WIDTH)]))
    types = {name: each.dtype for name, each in model.get_module().named_parameters()}
    assert types == {
        "0.weight": torch.float16,
        "0.bias": torch.float16,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
    }
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.fp16_optimizer is None


def _is_elsewhere(gradient: Any) -> bool:
    """Whether another rank has the numbers of a gradient."""
    try:
        gradient.clone()
    except UnsupportedError:
        return True
    return False


def _owned(model: Any, optimizer: Any) -> list[str]:
    held = {id(each) for group in optimizer.optimizer.param_groups for each in group["params"]}
    return [name for name, each in model.local_named_parameters() if id(each) in held]


@torch_case("config.shard_optimizer_state", "torch.state_sharding", worlds=("owners",))
def every_parameter_is_updated_by_one_rank(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    model = adapter.model()
    optimizer = _optimizer(adapter, model)
    plain = adapter.net().to(adapter.device)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        _stepped(adapter, model)
        plain(adapter.tensor(adapter.batch(EXAMPLES))).square().mean().backward()
        if smp.rank() == 0 and not optimizer.state:
            assert any(_is_elsewhere(each.grad) for each in model.local_parameters())
        optimizer.step()
        reference.step()
    owned = _owned(model, optimizer)
    everywhere = smp.allgather(owned, smp.DP_GROUP)
    names = [name for name, _ in model.local_named_parameters()]
    assert sorted(name for each in everywhere for name in each) == sorted(names)
    assert all(everywhere)
    assert len(optimizer.state) == len(owned)
    want = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.detach(), want[name].detach(), rtol=0, atol=1e-6)


@torch_case(
    "torch.in_use.DistributedOptimizer_local_state_dict_gather_if_shard", worlds=("owners",)
)
def shards_of_state_come_together_if_asked(adapter: Any) -> None:
    smp = adapter.smp
    model = adapter.model()
    optimizer = _optimizer(adapter, model)
    _stepped(adapter, model)
    optimizer.step()
    names = {name for name, _ in model.local_named_parameters()}
    own = optimizer.local_state_dict(gather_if_shard=False)
    assert set(own["state"]) == set(_owned(model, optimizer)) < names
    assert own["_smp_is_partial"]
    whole = optimizer.local_state_dict(gather_if_shard=True)
    assert set().union(*whole["state"]) == names  # one a rank that shards it
    assert not whole["_smp_is_partial"]
    other = adapter.model()
    its_optimizer = _optimizer(adapter, other)
    its_optimizer.load_state_dict(own, False)
    assert set().union(*its_optimizer.local_state_dict()["state"]) == names
    smp.barrier()


@torch_case("FP16_Optimizer", worlds=("half",))
def what_loss_scales_are_made_of_is_checked(adapter: Any) -> None:
    import pytest

    model = adapter.model()
    with pytest.raises(TypeError, match=r"init_scale, .* received window"):
        _optimizer(adapter, model, dynamic_loss_scale=True, dynamic_loss_args={"window": 2})
    with pytest.raises(ValueError, match="static or dynamic"):
        _optimizer(adapter, model, static_loss_scale=8.0, dynamic_loss_scale=True)
    with pytest.raises(ValueError, match="scale_factor must be a number above 1"):
        _optimizer(adapter, model, dynamic_loss_scale=True, scale_factor=1.0)
    for wrong in (float("inf"), float("nan"), 0.0, -1.0):
        with pytest.raises(ValueError, match="init_scale must be a number above 0"):
            _optimizer(adapter, model, dynamic_loss_scale=True, init_scale=wrong)
    assert _optimizer(adapter, model, static_loss_scale=8.0).loss_scale == 8.0


@torch_case(
    "torch.in_use.get_full_state_dict_from_sharded_data_parallel_checkpoint",
    worlds=("half", "owners"),
)
def files_of_all_ranks_become_one_state_without_a_job(adapter: Any) -> None:
    import torch

    from smdistributed.modelparallel.torch import sharded_data_parallel_checkpoint as merging

    smp = adapter.smp
    model = adapter.model()
    optimizer = _optimizer(adapter, model, static_loss_scale=256.0)
    _stepped(adapter, model)
    optimizer.step()
    folder = shared_folder(adapter)
    smp.save_checkpoint(folder, "one", model=model, optimizer=optimizer)
    merge = merging.get_full_state_dict_from_sharded_data_parallel_checkpoint
    state = merge(folder, tag="one")
    names = [name for name, _ in model.get_module().named_parameters()]
    assert set(names) < set(state) == set(model.state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32}
    whole = optimizer.state_dict()["state"]
    for number, (name, parameter) in enumerate(model.get_module().named_parameters()):
        want = whole[number].get("master", parameter.detach())  # in full precision
        assert state[name].equal(want.cpu()), name
    assert merge(folder, dtype=torch.bfloat16)[names[0]].dtype is torch.bfloat16
    smp.barrier()


@torch_case("smp.save_checkpoint", "smp.resume_from_checkpoint", worlds=("half",))
def loss_scale_and_masters_come_back(adapter: Any) -> None:
    smp = adapter.smp
    scaling = {"init_scale": 64.0, "scale_window": 2}

    def fresh() -> tuple[Any, Any]:
        model = adapter.model()
        return model, _optimizer(adapter, model, dynamic_loss_scale=True, dynamic_loss_args=scaling)

    def go(model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            _stepped(adapter, model)
            optimizer.step()

    model, optimizer = fresh()
    go(model, optimizer, 3)
    folder = shared_folder(adapter)
    smp.save_checkpoint(folder, 3, model=model, optimizer=optimizer)
    assert list(Path(folder, "3_partial").glob("fp16_states_0_0.pt"))
    other, its_optimizer = fresh()
    smp.resume_from_checkpoint(folder, 3, model=other, optimizer=its_optimizer)
    for one in ((model, optimizer), (other, its_optimizer)):
        go(*one, 1)
    assert its_optimizer.loss_scale == optimizer.loss_scale == 256.0
    _is_that_of(other, model.get_module())
    smp.barrier()
