"""The optimizer wrapper in one process: schedulers, state, and what it refuses."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from smdistributed.modelparallel.common.config import load
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.torch.optimizer import distributed
from smdistributed.modelparallel.torch.optimizer.distributed import DistributedOptimizer
from smdistributed.modelparallel.torch.precision import one_pass_adam


def runtime(pp_size: int = 1) -> Any:
    return types.SimpleNamespace(
        config=load("pytorch", {}, environ={}),
        topology=Topology(pp_size, pp_size=pp_size),
        rank=0,
        optimizers=[],
        live_models=list,
        is_in_step=False,
        replaced_parameters={},
        sharding_groups=None,
        device=torch.device("cpu"),
        communicator=types.SimpleNamespace(allgather=lambda obj, group: [obj]),
    )


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))]


def train(given: list[nn.Parameter], optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        for parameter in given:
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        optimizer.step()


@pytest.mark.parametrize("is_cuda", [False, True])
def test_large_tensors_of_a_gpu_are_updated_in_one_pass(
    is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    work = one_pass_adam._adam
    monkeypatch.setattr(one_pass_adam, "_adam", lambda *a: (calls.append(a[0].numel()), work(*a)))
    monkeypatch.setattr(one_pass_adam, "has_kernel", lambda: True)
    monkeypatch.setattr(distributed, "SMALLEST_ALONE", 6)
    own, plain = parameters(), parameters()
    made = runtime()
    if is_cuda:
        made.device = torch.device("cuda")
    train(plain, torch.optim.AdamW(plain, lr=0.1, fused=True))
    train(own, DistributedOptimizer(made, torch.optim.AdamW(own, lr=0.1, fused=True)))
    assert calls == ([6] * 3 if is_cuda else [])
    torch.testing.assert_close(own, plain)


Schedule = Callable[[Any], Any]


def sequential(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(
        optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2]
    )


SCHEDULES: dict[str, Schedule] = {
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "sequential": sequential,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_torch_work_over_the_wrapper(name: str) -> None:
    rates = []
    for wrap in (lambda o: o, lambda o: DistributedOptimizer(runtime(), o)):
        given = parameters()
        optimizer = wrap(torch.optim.SGD(given, lr=0.1, momentum=0.9))
        scheduler = SCHEDULES[name](optimizer)
        seen = []
        for _ in range(5):
            train(given, optimizer, 1)
            scheduler.step()
            group = optimizer.param_groups[0]
            seen.append((group["lr"], group["momentum"], given[0].sum().item()))
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len({rate for rate, *_ in rates[1]}) > 1


def test_reduce_on_plateau_works_over_the_wrapper() -> None:
    optimizer = DistributedOptimizer(runtime(), torch.optim.SGD(parameters(), lr=1.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(2):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_state_comes_back_by_number_and_by_name() -> None:
    given = parameters()
    optimizer = DistributedOptimizer(runtime(), torch.optim.Adam(given, lr=0.3))
    train(given, optimizer)
    local, whole = optimizer.local_state_dict(gather_if_shard=False), optimizer.state_dict()
    assert local["_smp_is_partial"] is False
    assert local["param_groups"][0]["params"] == list(local["state"]) == ["#0.0", "#0.1"]
    assert whole["param_groups"][0]["params"] == list(whole["state"]) == [0, 1]
    assert whole.keys() == optimizer.orig_state_dict().keys() == {"state", "param_groups"}
    for state in (local, whole):
        others = parameters()
        other = DistributedOptimizer(runtime(), torch.optim.Adam(others, lr=0.9))
        other.load_state_dict(state, True)
        assert other.param_groups[0]["lr"] == 0.3
        for mine, its in zip(given, others, strict=True):
            moments = optimizer.state[mine]["exp_avg"], other.state[its]["exp_avg"]
            assert torch.equal(*moments)
            assert moments[0].data_ptr() != moments[1].data_ptr()


def test_state_of_other_parameters_is_refused() -> None:
    optimizer = DistributedOptimizer(runtime(), torch.optim.Adam(parameters()))
    for others in (parameters()[:1], [{"params": [one]} for one in parameters()]):
        with pytest.raises(ValueError, match=r"parameter groups of \[.*the optimizer has \[2\]"):
            optimizer.load_state_dict(torch.optim.Adam(others).state_dict())


def test_a_parameter_twice_is_refused_by_name() -> None:
    one = nn.Parameter(torch.ones(3, 2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        plain = torch.optim.SGD([one, one], lr=0.1)
    with pytest.raises(ValueError, match=r"of shape \(3, 2\) is in the optimizer twice"):
        DistributedOptimizer(runtime(), plain)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer; received list"):
        DistributedOptimizer(runtime(), [])  # type: ignore[arg-type]


def test_lbfgs_updates_no_masters() -> None:
    plain = torch.optim.LBFGS(parameters())
    DistributedOptimizer(runtime(2), plain)
    shared = runtime()
    shared.config = load("pytorch", {"shard_optimizer_state": True, "ddp": True}, environ={})
    with pytest.raises(UnsupportedError, match="without fp16, bf16, shard_optimizer_state"):
        DistributedOptimizer(shared, plain)


def test_the_model_comes_before_the_state() -> None:
    optimizer = DistributedOptimizer(runtime(2), torch.optim.Adam(parameters()))
    with pytest.raises(SMPError, match="make the model before"):
        optimizer.load_state_dict(optimizer.orig_state_dict())


def test_other_attributes_are_the_wrapped_optimizers() -> None:
    plain = torch.optim.SGD(parameters(), lr=0.1)
    plain.scale_loss = 3  # type: ignore[attr-defined]
    optimizer = DistributedOptimizer(runtime(), plain)
    assert optimizer.scale_loss == 3
    assert optimizer.optimizer is plain
    called = []
    optimizer.register_step_post_hook(lambda *args: called.append(args))
    optimizer.step()
    assert called
