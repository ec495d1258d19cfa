"""Half precision must compute what a plain loop with the same arithmetic computes, bit for bit.

Long, since it is one list of cases beside that loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference import own_share, split
from torch import nn
from torch.nn import functional as F
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.gradients.elsewhere import GradientElsewhere
from smdistributed.modelparallel.torch.model.shell import FP16_Module
from smdistributed.modelparallel.torch.precision.master_update import FP16_Optimizer

WIDTH, STEPS = 8, 4
STATIC = 1024.0


def half() -> torch.dtype:
    return torch.float16 if smp.state.cfg.fp16 else torch.bfloat16


def net() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 3))


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = generator(5)
    size = 4 * smp.state.cfg.microbatches * smp.dp_size()
    return [
        (
            torch.randn(size, WIDTH, generator=draws),
            torch.randint(3, (size,), generator=draws),
        )
        for _ in range(steps)
    ]


def body(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(inputs).float(), targets)
    model.backward(loss)
    return loss


class PlainLoop:
    """The same arithmetic, written out, for all data-parallel ranks."""

    def __init__(
        self,
        make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
        scale: float,
        max_norm: float | None,
        model: Callable[[], nn.Module] = net,
    ) -> None:
        self.replicas = [model().to(half()) for _ in range(smp.dp_size())]
        self.masters = [nn.Parameter(each.detach().float()) for each in self._of(0)]
        self.optimizer = make(self.masters)
        self.scale = scale
        self.max_norm = max_norm
        self.norm = torch.zeros(())

    def _of(self, rank: int) -> list[nn.Parameter]:
        return list(self.replicas[rank].parameters())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        """Returns the losses of the microbatches of this rank."""
        losses = []
        for rank, replica in enumerate(self.replicas):
            replica.zero_grad()
            share = [each.chunk(smp.dp_size())[rank] for each in (inputs, targets)]
            for (one, target), weight in zip(*split(share, [0, 0]), strict=True):
                loss = F.cross_entropy(replica(one.to(half())).float(), target)
                loss.backward(torch.full_like(loss, weight * self.scale))
                if rank == smp.dp_rank():
                    losses.append(loss.detach())
        for place, master in enumerate(self.masters):
            parts = [self._of(rank)[place].grad / smp.dp_size() for rank in range(smp.dp_size())]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            master.grad = total.float() * (1 / self.scale)
        if self.max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        self.optimizer.step()
        for rank in range(smp.dp_size()):
            for parameter, master in zip(self._of(rank), self.masters, strict=True):
                parameter.data.copy_(master)
        return losses


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, fused=True)


def same_bits(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert got.dtype is want.dtype, what
    # What is gathered is in host memory.
    got, want = got.cpu(), want.cpu()
    assert torch.equal(got, want), (what, (got - want).abs().max().item())


def check_parameters(model: smp.DistributedModel, plain: PlainLoop) -> None:
    want = dict(plain.replicas[0].named_parameters())
    for name, parameter in model.local_named_parameters():
        same_bits(parameter.detach(), want[name].detach(), name)


def trained(make: Any, max_norm: float | None, scale: float | None = None) -> None:
    scale = scale or (STATIC if smp.state.cfg.fp16 else 1.0)
    plain = PlainLoop(make, scale, max_norm)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        make(model.parameters()), static_loss_scale=scale if smp.state.cfg.fp16 else None
    )
    step = smp.step(body)
    for data in batches():
        want = plain.step(*data)
        optimizer.zero_grad()
        got = step(model, *own_share(data, [0, 0]))
        for one, other in zip(got.outputs, want, strict=True):
            same_bits(one, other, "loss")
        if max_norm is not None:
            norm = optimizer.clip_master_grads(max_norm)
            assert norm.item() == pytest.approx(plain.norm.item(), rel=1e-6)
            assert norm.item() > max_norm
        optimizer.step()
        if max_norm is None or smp.state.cfg.pipeline_parallel_degree == 1:
            check_parameters(model, plain)
        else:  # the norm of partitions is rounded in another order
            for name, parameter in model.local_named_parameters():
                want_value = plain.replicas[0].get_parameter(name)
                assert torch.allclose(parameter, want_value, rtol=2**-7, atol=1e-6)
    assert not optimizer.overflow


def case_overflow_on_one_rank() -> None:
    """A gradient that is not finite on one rank leaves the update out on all, and scale halves."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        adam(model.parameters()),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 64.0, "scale_window": 2},
    )
    step = smp.step(body)
    seen = []
    for number, data in enumerate(batches(6)):
        optimizer.zero_grad()
        step(model, *own_share(data, [0, 0]))
        before = {name: each.detach().clone() for name, each in model.local_named_parameters()}
        here = (each for each in model.local_parameters() if each.grad is not None)
        own = [each for each in here if not isinstance(each.grad, GradientElsewhere)]
        if number in (1, 2) and smp.rank() == smp.size() - 1:
            own[0].grad.view(-1)[0] = float("inf") if number == 1 else float("nan")
        optimizer.step()
        moved = {
            name: not torch.equal(before[name], each)
            for name, each in model.local_named_parameters()
        }
        seen.append((optimizer.overflow, any(moved.values()), optimizer.loss_scale))
        assert len(set(moved.values())) == 1 or not optimizer.overflow
    assert seen == [
        (False, True, 64.0),
        (True, False, 32.0),
        (True, False, 16.0),
        (False, True, 16.0),
        (False, True, 32.0),
        (False, True, 32.0),
    ]
    assert len(set(smp.allgather(tuple(seen), smp.WORLD))) == 1


def case_default_scale_comes_down() -> None:
    """The documented start, 2**32, is too large for fp16: updates are left out until it fits."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()), None, dynamic_loss_scale=True)
    step = smp.step(body)
    data = batches(1)[0]
    skipped = 0
    for _ in range(40):
        optimizer.zero_grad()
        step(model, *own_share(data, [0, 0]))
        optimizer.step()
        skipped += optimizer.overflow
    assert 10 < skipped < 30
    assert optimizer.loss_scale == 2.0 ** (32 - skipped)


def case_least_scale_is_an_error() -> None:
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        adam(model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0, "min_scale": 2.0},
    )
    step = smp.step(body)
    step(model, *own_share(batches(1)[0], [0, 0]))
    for parameter in model.local_parameters():
        parameter.grad.fill_(float("inf"))
    with pytest.raises(SMPError, match=r"at its min_scale \(2\): the model or its loss diverges"):
        optimizer.step()


def case_names_and_types() -> None:
    plain = net()
    model = smp.DistributedModel(plain)
    assert type(model.module.module) is FP16_Module
    assert model.module.module.module is plain is model.get_module()
    assert {each.dtype for each in model.parameters()} == {half()}
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    assert type(optimizer.fp16_optimizer) is FP16_Optimizer
    assert type(optimizer.optimizer) is torch.optim.AdamW

    @smp.step
    def outputs(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(inputs)
        return found

    data = batches(1)[0]
    assert outputs(model, own_share(data, [0, 0])[0]).concat().dtype is half()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    smp.step(body)(model, *own_share(data, [0, 0]))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    masters = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
    assert {each.dtype for each in masters} == {torch.float32}
    assert len(masters) == len(list(model.local_parameters()))


def case_gradients_carry_the_scale() -> None:
    """Clipping them is refused; so is an update of what came in another way."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()), static_loss_scale=STATIC)
    data = own_share(batches(1)[0], [0, 0])
    smp.step(body)(model, *data)
    with pytest.raises(UnsupportedError, match=r"call optimizer\.clip_master_grads"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if smp.pp_size() == 1:
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]).float(), data[1]).backward()
        with pytest.raises(SMPError, match=r"differentiated by model\.backward"):
            optimizer.step()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0]).float(), data[1])
        model.backward(loss)
        optimizer.step()


def case_a_changed_parameter_counts() -> None:
    """What a script writes to a parameter between updates is where its master goes on."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    data = own_share(batches(1)[0], [0, 0])
    step = smp.step(body)
    step(model, *data)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.fill_(0.5)
    step(model, *data)
    with pytest.raises(SMPError, match=r"call that of the DistributedOptimizer"):
        optimizer.optimizer.step()
    optimizer.step()
    for parameter in model.local_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 0.5))


def case_delayed_parameters_are_cast() -> None:
    with smp.delay_param_initialization():
        torch.manual_seed(9)
        delayed = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    torch.manual_seed(9)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).to(half())
    model = smp.DistributedModel(delayed)

    @smp.step
    def outputs(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(inputs)
        return found

    outputs(model, torch.ones(smp.state.cfg.microbatches, 64))
    want = plain.state_dict()
    for name, value in model.local_named_parameters():
        same_bits(value.detach(), want[name], name)


def case_state_goes_on() -> None:
    """Masters, state and loss scale come back: the next steps are those of before, to the bit."""

    def fresh() -> tuple[Any, Any]:
        model = smp.DistributedModel(net())
        made = smp.DistributedOptimizer(
            adam(model.parameters()),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 64.0, "scale_window": 3},
        )
        return model, made

    model, optimizer = fresh()
    step = smp.step(body)
    data = [own_share(each, [0, 0]) for each in batches(6)]

    def go(model: Any, optimizer: Any, some: Any) -> list[float]:
        losses = []
        for each in some:
            optimizer.zero_grad()
            losses.append(step(model, *each).reduce_mean().item())
            optimizer.step()
        return losses

    go(model, optimizer, data[:3])
    saved = [
        (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())),
        (copy.deepcopy(model.local_state_dict()), copy.deepcopy(optimizer.local_state_dict())),
    ]
    gathered = saved[-1][1]
    if smp.state.cfg.shard_optimizer_state:  # as scripts do that keep all shards in one file
        shard = gathered["state"][smp.rdp_rank()]
        assert all("master" in values for values in shard.values())
        saved.append((saved[-1][0], {**gathered, "state": shard}))
    want = go(model, optimizer, data[3:])
    for weights, state in saved:
        other, its_optimizer = fresh()
        other.load_state_dict(weights)
        its_optimizer.load_state_dict(state)
        assert go(other, its_optimizer, data[3:]) == want
        if smp.state.cfg.fp16:
            assert its_optimizer.loss_scale == optimizer.loss_scale
        for one, two in zip(model.local_parameters(), other.local_parameters(), strict=True):
            same_bits(one.detach(), two.detach(), "parameter")
        for one, two in zip(optimizer.param_groups, its_optimizer.param_groups, strict=True):
            for first, second in zip(one["params"], two["params"], strict=True):
                same_bits(first.detach(), second.detach(), "master")


def case_groups_and_frozen_parameters() -> None:
    """A group that is added later gets masters, a frozen parameter gets one when it is set free."""
    model = smp.DistributedModel(net())
    first, *rest = model.get_module().parameters()
    first.requires_grad_(False)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([first, rest[0]], lr=0.5))
    data = own_share(batches(1)[0], [0, 0])
    step = smp.step(body)

    def moved() -> list[str]:
        optimizer.zero_grad()
        model.zero_grad()
        step(model, *data)
        before = {name: each.detach().clone() for name, each in model.local_named_parameters()}
        optimizer.step()
        found = [
            name
            for name, each in model.local_named_parameters()
            if not torch.equal(each, before[name])
        ]
        return sorted({name for part in smp.allgather(found, smp.PP_GROUP) for name in part})

    names = [name for name, _ in model.get_module().named_parameters()]
    assert moved() == [names[1]]
    with pytest.raises(ValueError, match="is in the optimizer twice"):
        optimizer.add_param_group({"params": [rest[0]]})
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": rest[1:], "lr": 0.25})
    first.requires_grad_(True)
    assert set(moved()) >= {names[0], names[1], names[-1]}
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {each.dtype for each in held} <= {torch.float32}


def case_a_scaler_of_torch() -> None:
    """torch's GradScaler unscales what is updated, and all ranks skip together."""
    data = [tuple(each.chunk(smp.dp_size())[smp.dp_rank()] for each in pair) for pair in batches(4)]

    def trained_with(scale: float) -> dict[str, torch.Tensor]:
        model = smp.DistributedModel(net())
        optimizer = smp.DistributedOptimizer(momentum(model.parameters()))
        scaler = smp.amp.GradScaler(init_scale=scale, enabled=scale > 1)

        @smp.step
        def step(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(inputs).float(), targets)
            model.backward(scaler.scale(loss))
            return loss

        for number, pair in enumerate(data):
            optimizer.zero_grad()
            step(model, *pair)
            if number == 1:  # twice, and clipped between
                scaler.unscale_(optimizer)
                optimizer.clip_master_grads(0.05)
            if number == 2 and scale > 1:
                last = list(model.local_parameters())[-1]
                if smp.rank() == smp.size() - 1:
                    last.grad[0] = float("inf")
                before = last.detach().clone()
                scaler.step(optimizer)
                same_bits(last.detach(), before, "skipped on all")
                scaler.update()
                assert scaler.get_scale() == scale / 2
            elif number != 2:
                scaler.step(optimizer)
                scaler.update()
        return {name: each.detach().clone() for name, each in model.local_named_parameters()}

    want, got = trained_with(1.0), trained_with(16.0)
    for name, value in want.items():
        if half() is torch.bfloat16:
            same_bits(got[name], value, name)
        torch.testing.assert_close(got[name], value, rtol=1e-2, atol=1e-3)


BIT_FOR_BIT: dict[str, Callable[[], None]] = {
    "adam": lambda: trained(adam, None),
    "momentum": lambda: trained(momentum, None),
    "fused": lambda: trained(fused, None),
    "clipped": lambda: trained(adam, 0.01),
}
FP16: dict[str, Callable[[], None]] = {
    "overflow_on_one_rank": case_overflow_on_one_rank,
    "default_scale_comes_down": case_default_scale_comes_down,
    "least_scale_is_an_error": case_least_scale_is_an_error,
    "gradients_carry_the_scale": case_gradients_carry_the_scale,
}
BOTH: dict[str, Callable[[], None]] = {
    "names_and_types": case_names_and_types,
    "a_scaler_of_torch": case_a_scaler_of_torch,
    "a_changed_parameter_counts": case_a_changed_parameter_counts,
    "delayed_parameters_are_cast": case_delayed_parameters_are_cast,
    "state_goes_on": case_state_goes_on,
    "groups_and_frozen_parameters": case_groups_and_frozen_parameters,
}


def losses_around_a_checkpoint(path: str, *, resume: bool) -> list[float]:
    """Trains three steps with a checkpoint after the first, or those after it when resuming."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        adam(model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 64.0, "scale_window": 1},
    )
    step = smp.step(body)
    data = [own_share(each, [0, 0]) for each in batches(3)]
    losses = []
    for number, each in enumerate(data):
        if number == 0 and resume:
            assert smp.resume_from_checkpoint(path, partial=True) == "one"
            continue
        optimizer.zero_grad()
        losses.append(step(model, *each).reduce_mean().item())
        optimizer.step()
        if number == 0:
            smp.save_checkpoint(
                path, tag="one", model=model, optimizer=optimizer, user_content="one"
            )
    return [*losses[-2:], optimizer.loss_scale]


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = smp.nn.DistributedLinear(WIDTH, 4 * WIDTH)
        self.norm = nn.LayerNorm(4 * WIDTH)
        self.down = smp.nn.DistributedLinear(4 * WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.norm(self.up(inputs)).relu())
        return found


def slices() -> None:
    """With slices and owners: the numbers of one process as far as fp16 goes, skipped together."""
    torch.manual_seed(8)
    model = smp.DistributedModel(Sliced())
    weights = model.state_dict()
    plain = nn.ModuleDict(
        {
            "up": nn.Linear(WIDTH, 4 * WIDTH),
            "norm": nn.LayerNorm(4 * WIDTH),
            "down": nn.Linear(4 * WIDTH, 3),
        }
    )
    plain.load_state_dict({name: value.float() for name, value in weights.items()})
    reference = momentum(plain.parameters())
    optimizer = smp.DistributedOptimizer(momentum(model.parameters()), static_loss_scale=STATIC)
    step = smp.step(body)
    for number, (inputs, targets) in enumerate(batches(4)):
        optimizer.zero_grad()
        reference.zero_grad()
        got = step(model, *own_share([inputs, targets], [0, 0])).reduce_mean()
        hidden = plain["norm"](plain["up"](inputs)).relu()
        loss = F.cross_entropy(plain["down"](hidden), targets)
        loss.backward()
        mean = sum(smp.allgather(got.item(), smp.WORLD)) / smp.size()
        assert mean == pytest.approx(loss.item(), rel=2e-3)
        norm = optimizer.clip_master_grads(0.1)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert norm.item() == pytest.approx(want.item(), rel=5e-3)
        optimizer.step()
        reference.step()
        assert not optimizer.overflow, number
    optimizer.zero_grad()
    step(model, *own_share(batches(1)[0], [0, 0]))
    before = [each.detach().clone() for each in model.local_parameters()]
    if smp.rank() == smp.size() - 1:
        own = (each.grad for each in model.parameters() if type(each.grad) is torch.Tensor)
        next(own).fill_(float("nan"))
    optimizer.step()
    assert optimizer.overflow
    for one, other in zip(model.local_parameters(), before, strict=True):
        same_bits(one.detach(), other, "parameter")
