"""Sharded data parallelism: parameters in shards, and nothing else changes.

Long, since it is one list of cases that share their nets.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from half_cases import STATIC, PlainLoop, adam, batches, half, momentum, net, same_bits
from reference import own_share, run_plain, split
from torch import nn
from torch.nn import functional as F
from trained_beside import TOLERANCE, Make, body, trained_beside
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import (
    CheckpointError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.torch.compat.private.below import operated_by
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter

CLIP = 0.05


def expect_shards(model: smp.DistributedModel) -> None:
    """Something is cut, else a comparison proves nothing; what is not used is not here."""
    own = dict(model.local_named_parameters())
    found = [name for name, each in own.items() if isinstance(each, ShardedParameter)]
    assert found, list(own)
    assert model.data_parallel.shards is not None
    home = model.data_parallel.shards.model
    assert home.residency.live == 0
    assert all(unit.memory is None for unit in home.units)


def compared(
    build: Callable[[], nn.Module], make: Make, data: list[Any], **options: Any
) -> smp.DistributedModel:
    """As ``trained_beside``; and parameters are in shards."""
    _, model = trained_beside(build, make, data, **options)
    if smp.pp_size() == 1:
        expect_shards(model)
    return model


def trained(make: Make, max_norm: float | None) -> None:
    compared(net, make, batches(10), max_norm=max_norm)


# ------------------------------------------------------------------ models of other kinds


class Tied(nn.Module):
    """A weight with two places, one of which is read by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.second(torch.tanh(self.first(inputs))))
        return self.head(hidden @ self.first.weight.t() + self.first.weight[0])


class Unused(nn.Module):
    """Parameters that no loss depends on, others that some steps use, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.takes_part = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.used(inputs)))
        if self.takes_part:
            hidden = hidden + self.sometimes(inputs)
        return self.head(hidden)


class Turned(nn.Module):
    """Layers whose order a script changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.order = [0, 1, 2, 3]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            inputs = torch.tanh(self.layers[number](inputs))
        return self.head(inputs)


class Cut(nn.Module):
    """Shapes that no degree divides, fewer rows than ranks, and a parameter without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(1, 8))
        self.odd = nn.Linear(8, 7)
        self.norm = nn.LayerNorm(7)
        self.conv = nn.Conv1d(1, 3, 2)
        self.head = nn.Linear(18, 3)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.odd(inputs * self.wide)) * self.factor
        return self.head(self.conv(hidden.unsqueeze(1)).flatten(1))


class Checkpointed(nn.Module):
    """Activations that are computed again, in both ways of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](inputs)
        for layer, reentrant in ((self.layers[1], False), (self.layers[2], True)):
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=reentrant)
        return self.head(hidden)


class Recurrent(nn.Module):
    """Parameters that one function takes as a list, and a scan over attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        # A bias of all keys changes nothing, and Adam makes steps of the rounding of its gradient.
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(inputs.unflatten(1, (2, 4)))
        hidden, _ = self.attention(hidden, hidden, hidden)
        return self.head(hidden[:, -1])


class Squared(torch.autograd.Function):
    """A function of the user's that keeps a parameter in two ways."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight
        return inputs @ weight.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (inputs,) = ctx.saved_tensors
        weight = ctx.weight
        return gradient @ weight.square().t(), 2 * weight * (inputs.t() @ gradient)


class Functions(nn.Module):
    """Parameters in lists, views that are kept, a penalty of weights, a function of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept = [weight.t() for weight in self.weights]
        for weight in reversed(kept):
            inputs = torch.tanh(inputs @ weight)
        return self.head(Squared.apply(inputs, self.weights[0]))


def penalised(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    module = model.get_module() if hasattr(model, "get_module") else model.module
    loss = F.cross_entropy(model(inputs), targets)
    loss = loss + 0.1 * sum(weight.pow(2).mean() for weight in module.weights)
    model.backward(loss)
    return loss


def seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return kind()

    return build


def case_unused_parameters() -> None:
    def change(reference: nn.Module, model: Any, step: int) -> None:
        for module in (reference, model.get_module()):
            module.takes_part = step in (1, 3)

    model = compared(seeded(Unused), momentum, batches(5), between=change)
    never = [each for name, each in model.local_named_parameters() if name.startswith("never")]
    assert never or smp.pp_size() > 1
    assert all(each.grad is None for each in never)


def case_the_order_changes() -> None:
    def change(reference: nn.Module, model: Any, step: int) -> None:
        for module in (reference, model.get_module()):
            module.order = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 0, 1], [1]][step % 4]

    compared(seeded(Turned), adam, batches(6), between=change)


def case_parameters_are_frozen_between_steps() -> None:
    def change(reference: nn.Module, model: Any, step: int) -> None:
        for module in (reference, model.get_module()):
            module.layers[1].requires_grad_(step % 2 == 0)

    compared(seeded(Turned), momentum, batches(4), between=change)


# ------------------------------------------------------------------ what scripts do between steps


def case_parameters_are_whole_between_steps() -> None:
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    step = smp.step(body)
    weight: Any = model.get_module()[0].weight
    step(model, *own_share(batches(1)[0], [0, 0]))
    assert (weight.shape, weight.numel(), weight.dim()) == ((8, 8), 64, 2)
    assert sum(each.numel() for each in model.parameters()) == sum(
        each.numel() for each in net().parameters()
    )
    assert weight in set(model.parameters())
    assert weight.to(weight.device) is weight
    assert weight.grad is weight.grad
    assert weight.grad.shape == (8, 8)
    want = model.state_dict()["0.weight"]
    assert copy.deepcopy(weight).equal(want)
    assert type(copy.deepcopy(weight)) is nn.Parameter
    assert pickle.loads(pickle.dumps(weight)).equal(want)
    assert model.get_module().state_dict()["0.weight"].equal(want)
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1.0
    with pytest.raises(UnsupportedError, match=r"the memory of 0\.weight.*clone"):
        weight.data_ptr()
    with pytest.raises(UnsupportedError, match=r"0\.weight would get another form"):
        weight.detach().resize_(100)
    for data in (weight.data, weight):
        other = torch.zeros(8, 8)
        other.data = data
        with pytest.raises(
            UnsupportedError, match=r"given the data of one of which ranks have parts"
        ):
            other.sum()
    shared = torch.zeros(9, 8)
    with pytest.raises(UnsupportedError, match="nothing else sees its memory"):
        weight.data = shared[1:]
    with pytest.raises(UnsupportedError, match=r"nn\.Parameter was given 0\.weight"):
        nn.Parameter(weight)
    with pytest.raises(UnsupportedError, match="use register_hook"):
        weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(UnsupportedError, match="would need the whole model"):
        model.cpu()
    with pytest.raises(UnsupportedError, match="gradients go to the ranks"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UnsupportedError, match="give every rank the same number"), model.join():
        pass
    model.zero_grad()
    assert weight.grad is None
    optimizer.step()  # nothing to apply


def case_one_rank_alone_reads_no_parameter() -> None:
    """Who reads what the others do not is told so, as they are; nobody waits for ever."""
    model = smp.DistributedModel(net())
    weight = model.get_module()[0].weight
    step = smp.step(body)
    share = own_share(batches(1)[0], [0, 0])
    if smp.dp_rank() >= smp.state.cfg.sharded_data_parallel_degree:
        return  # another group would be told after communication_timeout that these do not reduce
    do = weight.norm if smp.rank() == 0 else functools.partial(step, model, *share)
    with pytest.raises(SMPError, match=r"rank 0 uses 0\.weight between steps; rank 1 begins"):
        do()


def case_writes_inside_a_step_are_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(inputs)

    model = smp.DistributedModel(nn.Sequential(Writes(8, 8), nn.Linear(8, 3)))
    with pytest.raises(UnsupportedError, match=r"clamp_ wrote to 0\.weight while the model ran"):
        smp.step(body)(model, *own_share(batches(1)[0], [0, 0]))


def case_gradients_change_number_by_number() -> None:
    """A script that scales gradients itself, and one that adds up several steps."""
    reference, model = net(), smp.DistributedModel(net())
    plain = momentum(reference.parameters())
    optimizer = smp.DistributedOptimizer(momentum(model.parameters()))
    step = smp.step(body)
    first, second = batches(2)
    for data in (first, second):
        run_plain(reference, body, data)
        step(model, *own_share(data, [0, 0]))
    for module in (reference, model):
        for each in module.parameters():
            each.grad.mul_(0.01)
    found = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    want = torch.nn.utils.get_total_norm([each.grad for each in reference.parameters()])
    assert found.item() == pytest.approx(want.item(), rel=TOLERANCE)
    largest = nn.utils.clip_grad_norm_(model.parameters(), 1e9, float("inf"))
    assert largest.item() == pytest.approx(
        max(each.grad.abs().max().item() for each in reference.parameters()), rel=TOLERANCE
    )
    plain.step()
    optimizer.step()
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6), name


def case_calls_outside_of_steps() -> None:
    reference, model = net(), smp.DistributedModel(net())
    inputs, targets = batches(1)[0]
    with torch.no_grad():
        assert torch.allclose(model(inputs), reference(inputs), atol=1e-6)
    expect_shards(model)
    share = own_share((inputs, targets), [0, 0])
    loss = F.cross_entropy(model(share[0]), share[1])
    loss.backward()
    F.cross_entropy(reference(inputs), targets).backward()
    found = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    want = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    assert found.item() == pytest.approx(want.item(), rel=TOLERANCE)
    expect_shards(model)


def case_a_state_comes_back() -> None:
    """The whole state fits a plain model; whole and own parts fit a sharded one."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    step = smp.step(body)
    data = batches(3)
    for each in data[:2]:
        optimizer.zero_grad()
        step(model, *own_share(each, [0, 0]))
        optimizer.step()
    whole, own = copy.deepcopy(model.state_dict()), copy.deepcopy(model.local_state_dict())
    of_optimizer = copy.deepcopy(optimizer.state_dict())
    own_of_optimizer = copy.deepcopy(optimizer.local_state_dict(gather_if_shard=False))
    gathered = copy.deepcopy(optimizer.local_state_dict())
    reference = net()
    reference.load_state_dict(whole)
    adam(reference.parameters()).load_state_dict(of_optimizer)

    def go(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        step(model, *own_share(data[2], [0, 0]))
        optimizer.step()
        return dict(model.state_dict())

    want = go(model, optimizer)
    for weights, state in ((whole, of_optimizer), (own, own_of_optimizer), (own, gathered)):
        other = smp.DistributedModel(net())
        its_optimizer = smp.DistributedOptimizer(adam(other.parameters()))
        other.load_state_dict(weights)
        its_optimizer.load_state_dict(state)
        got = go(other, its_optimizer)
        for name, value in want.items():
            same_bits(got[name], value, name)
    firsts = smp.allgather(own_of_optimizer, smp.WORLD)[0]
    with pytest.raises(CheckpointError, match=r"rank \d updates shard [1-9].* of shard 0 of"):
        optimizer.load_state_dict(firsts)


def case_a_rank_keeps_its_share() -> None:
    """Parameters, gradients and state: by bytes, between steps and the most inside one."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    total = sum(each.numel() for each in module.parameters())
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    inputs = torch.randn(4 * smp.state.cfg.microbatches, 32)
    smp.step(squares)(model, inputs)
    degree = smp.state.cfg.sharded_data_parallel_degree
    assert model.data_parallel.shards is not None
    home = model.data_parallel.shards.model
    rows = sum(
        max(each.shape) and -(-each.shape[0] // degree) * each.numel() // each.shape[0]
        for each in model.parameters()
    )
    assert total / degree <= rows <= total / degree * 1.05
    assert home.kept_bytes() == 4 * rows
    gradients = [each.shard.gradient for each in model.parameters()]
    assert sum(each.numel() for each in gradients if each is not None) <= rows
    memory = {
        each.shard.values.untyped_storage().data_ptr(): each.shard.values.untyped_storage().nbytes()
        for each in model.parameters()
    }
    # Memory that others read is aligned.
    assert 0 <= sum(memory.values()) - 4 * rows <= 256 * len(home.units)
    assert all(operated_by(each.shard.vacant) is not None for each in model.parameters())
    optimizer.step()
    state = sum(
        value.numel()
        for values in optimizer.state.values()
        for value in values.values()
        if value.dim()
    )
    assert state <= 2 * rows
    # What one call needs, and no more than the limit.
    assert 0 < home.residency.most_live <= max(smp.state.cfg.sdp_max_live_parameters, 33 * 32)


def case_what_parameters_were_made_of_is_not_written_to() -> None:
    """It may be a file that is mapped into memory, where each page that is written to stays."""
    torch.manual_seed(smp.rank())
    module = nn.Linear(32, 32)
    given = {name: each.data for name, each in module.named_parameters()}
    before = {name: each.clone() for name, each in given.items()}
    model = smp.DistributedModel(module)
    if smp.pp_size() == 1:
        expect_shards(model)
        assert all(torch.equal(given[name], each) for name, each in before.items())
    first = smp.allgather({name: each.tolist() for name, each in before.items()}, smp.WORLD)[0]
    state = model.state_dict() if smp.pp_size() == 1 else first
    assert {name: torch.as_tensor(each).tolist() for name, each in state.items()} == first


def case_sizes_are_told_of_all_parameters() -> None:
    """Of those in shards, of small ones, which stay whole, and of those of other partitions."""
    model = smp.DistributedModel(net())
    shapes = {name: each.shape for name, each in net().named_parameters()}
    smp.step(squares)(
        model, torch.randn(4 * smp.state.cfg.microbatches, model.get_module()[0].in_features)
    )
    here = {name for name, _ in model.local_named_parameters()}
    for name, each in model.named_parameters():
        told: Any = each
        assert told.ds_shape == shapes[name]
        assert told.ds_numel == shapes[name].numel()
        assert told.ds_tensor.ds_numel == told.ds_tensor.numel()
        assert (told.ds_tensor.ds_numel > 0) is (name in here)
        is_cut = isinstance(each, ShardedParameter)
        assert is_cut or name not in here or told.ds_tensor.equal(each.detach())
        assert not is_cut or told.ds_tensor.ds_numel < told.ds_numel


def squares(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


# ------------------------------------------------------------------ ranks that differ


class Differing(nn.Module):
    """One rank takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.right if smp.rank() % 2 else self.left)(inputs)


def case_ranks_that_differ_are_told() -> None:
    model = smp.DistributedModel(seeded(Differing)())
    given = own_share(batches(1)[0], [0, 0])
    if not model.data_parallel.shards.model.residency.shard_memory.is_common:
        smp.step(body)(model, *given)  # who reads shards does not need the others
        return
    with pytest.raises(SMPError, match=r"rank [02] uses left\.\w+; rank [13] uses right\.\w+"):
        smp.step(body)(model, *given)


def case_a_rank_that_gathers_less_is_told() -> None:
    """In a step without a backward pass, where nothing else would say so."""
    model = smp.DistributedModel(seeded(Turned)())
    inputs = own_share(batches(1)[0], [0, 0])[0]
    calls = 1 + smp.dp_rank()
    forward = smp.step(lambda model, inputs: sum(model(inputs) for _ in range(calls)))
    memory = model.data_parallel.shards.model.residency.shard_memory
    fits_at_once = smp.state.cfg.sdp_max_live_parameters > 1000
    if fits_at_once or not memory.is_common:
        forward(model, inputs)
        return
    done = "is done with a step or a call of the model"
    with pytest.raises(SMPError, match=rf"rank \d {done}; rank \d uses|uses \S+; rank \d {done}"):
        forward(model, inputs)


class Partly(nn.Module):
    """One rank leaves out a parameter that is gathered with others."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(12))
        self.bias = nn.Parameter(torch.randn(3, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            inputs = torch.tanh(inputs @ weight)
        inputs = inputs + self.bias.sum(0)
        scale = self.scale if smp.dp_rank() == 0 else self.scale.detach()
        return self.head(inputs * scale)


def case_a_gradient_on_some_ranks() -> None:
    """It counts as zero on the others, as without shards."""
    model = smp.DistributedModel(seeded(Partly)())
    reference = seeded(Partly)()
    inputs, targets = batches(1)[0]
    smp.step(body)(model, *own_share((inputs, targets), [0, 0]))
    size = len(inputs) // smp.dp_size()
    module = copy.deepcopy(reference)
    hidden = inputs
    for weight in module.weights:
        hidden = torch.tanh(hidden @ weight)
    hidden = hidden + module.bias.sum(0)
    scaled = torch.cat([hidden[:size] * module.scale, hidden[size:] * module.scale.detach()])
    F.cross_entropy(module.head(scaled), targets).backward()
    found = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    want = nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    assert found.item() == pytest.approx(want.item(), rel=TOLERANCE)


# ------------------------------------------------------------------ optimizers


def case_whole_updates() -> None:
    """What looks at whole parameters gets them, keeps its state whole, and goes on from that."""
    plain, twin = net(), net()
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters(), lr=0.05))
    other = torch.optim.Adafactor(twin.parameters(), lr=0.05)

    def both(optimizer: Any) -> None:
        for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
            gradient = torch.randn(same.shape)
            parameter.grad, same.grad = gradient.clone(), gradient
        nn.utils.clip_grad_norm_(twin.parameters(), smp.state.cfg.sdp_gradient_clipping)
        optimizer.step(), other.step()
        for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach().clone(), same.detach())

    both(optimizer)
    for read in ("state_dict", "local_state_dict"):
        state = getattr(optimizer, read)()
        optimizer = smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters(), lr=0.05))
        optimizer.load_state_dict(state)
        torch.testing.assert_close(optimizer.state_dict(), other.state_dict(), check_device=False)
        both(optimizer)


def case_a_model_in_half_precision() -> None:
    """Blocks of its own type are updated by sums in single precision, rounded at the end."""
    plain = net().bfloat16()
    model = smp.DistributedModel(copy.deepcopy(plain))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    gradients = [torch.randn_like(each).div_(100) for each in plain.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    wanted = [each - 0.5 * one for each, one in zip(plain.parameters(), gradients, strict=True)]
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.detach().clone(), want)


def case_delayed_parameters() -> None:
    # What is made on a GPU is not delayed.
    with torch.device("cpu"):
        with smp.delay_param_initialization():
            torch.manual_seed(11)
            module = nn.Sequential(nn.Linear(8, 160), nn.Tanh(), nn.Linear(160, 3))
        torch.manual_seed(11)
        want = nn.Sequential(nn.Linear(8, 160), nn.Tanh(), nn.Linear(160, 3)).state_dict()
    assert module[0].weight.is_meta
    model = smp.DistributedModel(module)
    smp.step(body)(model, *own_share(batches(1)[0], [0, 0]))
    for name, value in model.state_dict().items():
        same_bits(value.cpu(), want[name], name)


# ------------------------------------------------------------------ half precision


class ShardedLoop(PlainLoop):
    """The same arithmetic, written out: half gradients, summed in fp32 over ranks and passes."""

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        sums = [torch.zeros_like(master) for master in self.masters]
        num_microbatches = smp.state.cfg.microbatches
        passes = []
        for rank in range(smp.dp_size()):
            share = [each.chunk(smp.dp_size())[rank] for each in (inputs, targets)]
            passes.append(list(zip(*split(share, [0, 0]), strict=True)))
        for microbatch in range(num_microbatches):
            total = [torch.zeros_like(master) for master in self.masters]
            for rank, replica in enumerate(self.replicas):
                replica.zero_grad()
                (one, target), weight = passes[rank][microbatch]
                loss = F.cross_entropy(replica(one.to(half())).float(), target)
                loss.backward(torch.full_like(loss, weight * self.scale))
                if rank == smp.dp_rank():
                    losses.append(loss.detach())
                for place, each in enumerate(self._of(rank)):
                    total[place] += each.grad.float()
            for place, each in enumerate(total):
                sums[place] += each
        for master, each in zip(self.masters, sums, strict=True):
            master.grad = each / smp.dp_size() * (1 / self.scale)
        bound = smp.state.cfg.sdp_gradient_clipping
        self.norm = nn.utils.clip_grad_norm_(self.masters, bound)
        self.optimizer.step()
        for rank in range(smp.dp_size()):
            for parameter, master in zip(self._of(rank), self.masters, strict=True):
                parameter.data.copy_(master)
        return losses


def half_body(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(inputs).float(), targets)
    model.backward(loss)
    return loss


def case_half_bit_for_bit() -> None:
    scale = STATIC if smp.state.cfg.fp16 else 1.0
    plain = ShardedLoop(adam, scale, None)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        adam(model.parameters()), static_loss_scale=scale if smp.state.cfg.fp16 else None
    )
    step = smp.step(half_body)
    for data in batches(6):
        want = plain.step(*data)
        optimizer.zero_grad()
        got = step(model, *own_share(data, [0, 0]))
        for one, other in zip(got.outputs, want, strict=True):
            same_bits(one, other, "loss")
        norm = optimizer.clip_master_grads(1e9)
        assert norm.item() == pytest.approx(plain.norm.item(), rel=TOLERANCE)
        optimizer.step()
    state = model.state_dict()
    for name, value in plain.replicas[0].state_dict().items():
        # The factor of clipping is a norm, whose sum has another order on several ranks.
        assert torch.allclose(
            state[name].float().cpu(), value.float().cpu(), rtol=1e-2, atol=1e-5
        ), name
    expect_shards(model)


def case_gradients_of_masters_are_clipped() -> None:
    """All of them, and the next update and the next clipping see it; also what a script does."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        sgd(model.parameters()), static_loss_scale=STATIC if smp.state.cfg.fp16 else None
    )
    step = smp.step(half_body)
    for data in batches(2):
        optimizer.zero_grad()
        step(model, *own_share(data, [0, 0]))
        norm = optimizer.clip_master_grads(1e9).item()
        bound = norm / 100
        assert optimizer.clip_master_grads(bound).item() == pytest.approx(norm, rel=TOLERANCE)
        assert optimizer.clip_master_grads(bound).item() == pytest.approx(bound, rel=1e-4)
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(0.5)
        found = optimizer.clip_master_grads(1e9).item()
        assert found == pytest.approx(bound / 2, rel=1e-3)  # torch adds 1e-6 to norms
        want = [(each, each.detach() - each.grad) for each in updated(optimizer)]
        optimizer.step()
        for each, new in want:
            torch.testing.assert_close(each.detach(), new)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def updated(optimizer: Any) -> list[Any]:
    return [
        each
        for group in optimizer.param_groups
        for each in group["params"]
        if each.grad is not None
    ]


def case_overflow_on_one_rank() -> None:
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()), static_loss_scale=STATIC)
    step = smp.step(half_body)
    inputs, targets = own_share(batches(1)[0], [0, 0])
    before = copy.deepcopy(model.state_dict())
    if smp.dp_rank() == smp.dp_size() - 1:
        inputs = inputs * float("inf")
    step(model, inputs, targets)
    optimizer.step()
    assert optimizer.overflow
    for name, value in model.state_dict().items():
        same_bits(value, before[name], name)


CASES: dict[str, Callable[[], object]] = {
    "adam": lambda: trained(adam, None),
    "momentum_clipped": lambda: trained(momentum, CLIP),
    "tied": lambda: compared(seeded(Tied), adam, batches(4), max_norm=CLIP),
    "uneven": lambda: compared(seeded(Cut), adam, batches(4), max_norm=CLIP),
    "checkpointed": lambda: compared(seeded(Checkpointed), momentum, batches(3)),
    "recurrent": lambda: compared(seeded(Recurrent), momentum, batches(3)),
    "functions": lambda: compared(seeded(Functions), momentum, batches(3), body=penalised),
    "unused_parameters": case_unused_parameters,
    "the_order_changes": case_the_order_changes,
    "parameters_are_frozen_between_steps": case_parameters_are_frozen_between_steps,
    "parameters_are_whole_between_steps": case_parameters_are_whole_between_steps,
    "one_rank_alone_reads_no_parameter": case_one_rank_alone_reads_no_parameter,
    "writes_inside_a_step_are_refused": case_writes_inside_a_step_are_refused,
    "gradients_change_number_by_number": case_gradients_change_number_by_number,
    "calls_outside_of_steps": case_calls_outside_of_steps,
    "a_state_comes_back": case_a_state_comes_back,
    "a_rank_keeps_its_share": case_a_rank_keeps_its_share,
    "what_parameters_were_made_of": case_what_parameters_were_made_of_is_not_written_to,
    "ranks_that_differ_are_told": case_ranks_that_differ_are_told,
    "a_rank_that_gathers_less_is_told": case_a_rank_that_gathers_less_is_told,
    "a_gradient_on_some_ranks": case_a_gradient_on_some_ranks,
    "whole_updates": case_whole_updates,
    "a_model_in_half_precision": case_a_model_in_half_precision,
    "delayed_parameters": case_delayed_parameters,
    "sizes_are_told_of_all_parameters": case_sizes_are_told_of_all_parameters,
}
HALF: dict[str, Callable[[], object]] = {
    "half_bit_for_bit": case_half_bit_for_bit,
    "gradients_of_masters_are_clipped": case_gradients_of_masters_are_clipped,
}
FP16: dict[str, Callable[[], object]] = {"overflow_on_one_rank": case_overflow_on_one_rank}
#: Those that say something about partitions or slices too.
COMBINED = (
    "adam",
    "momentum_clipped",
    "unused_parameters",
    "a_state_comes_back",
    "checkpointed",
    "sizes_are_told_of_all_parameters",
)


# ------------------------------------------------------------------ checkpoints


class Mixed(nn.Module):
    """Slices where ranks split modules, a tied weight, a buffer, rows that no degree divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up = smp.nn.DistributedLinear(8, 16)
        self.down = smp.nn.DistributedLinear(16, 8)
        self.odd = nn.Linear(8, 7)
        self.last = nn.Linear(7, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.tanh(self.up(self.first(inputs))))
        return self.head(self.norm(torch.tanh(self.last(self.odd(hidden)))))


def losses_around_a_checkpoint(path: str, resume: bool) -> list[float]:
    """Trains four steps with a checkpoint after the second, or those after it when resuming."""
    draws = generator(2)
    data = [
        (torch.randn(24, 8, generator=draws), torch.randint(8, (24,), generator=draws))
        for _ in range(4)
    ]
    torch.manual_seed(9)
    model = smp.DistributedModel(Mixed(), broadcast_buffers=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    step = smp.step(half_body)
    losses = []
    for number, each in enumerate(data):
        if number < 2 and resume:
            continue
        if number == 2 and resume:
            found = smp.resume_from_checkpoint(path, partial=True)
            assert found == {"step": 2}
        optimizer.zero_grad()
        loss = step(model, *own_share(each, [0, 0])).reduce_mean().float().item()
        losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
        if number == 1 and not resume:
            content = {"step": 2}
            smp.save_checkpoint(
                path, tag="two", model=model, optimizer=optimizer, user_content=content
            )
    return losses[-2:]


def full_state_of(path: str) -> None:
    """One state out of the files of all ranks is the state of the model."""
    from smdistributed.modelparallel.torch import sharded_data_parallel_checkpoint as merging

    model = smp.DistributedModel(seeded(Tied)())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    for each in batches(2):
        optimizer.zero_grad()
        smp.step(half_body)(model, *own_share(each, [0, 0]))
        optimizer.step()
    smp.save_checkpoint(path, tag="one", model=model, optimizer=optimizer)
    found = merging.get_full_state_dict_from_sharded_data_parallel_checkpoint(path)
    state = model.state_dict()
    whole = optimizer.state_dict()["state"]
    assert set(found) == set(state)
    for number, (name, _) in enumerate(model.get_module().named_parameters()):
        same_bits(found[name], whole[number].get("master", state[name]), name)
    assert found["second.weight"] is found["first.weight"]
    assert state["second.weight"] is state["first.weight"]
    smp.barrier()


def without_the_state_of_the_optimizer(path: str) -> None:
    """Weights and settings come back, and the state of the optimizer begins anew."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    step = smp.step(half_body)
    data = own_share(batches(1)[0], [0, 0])
    step(model, *data)
    optimizer.step()
    smp.save_checkpoint(path, tag="one", model=model, optimizer=optimizer)
    want = copy.deepcopy(optimizer.state_dict())
    for keeps in (True, False):
        smp.resume_from_checkpoint(path, load_sharded_optimizer_state=keeps)
        state = optimizer.state_dict()["state"]
        for number, values in want["state"].items():
            assert ("exp_avg" in state.get(number, {})) is keeps
            if "master" in values:
                same_bits(state[number]["master"], values["master"], "master")


def gathered_between_hosts() -> None:
    """In two stages, on four ranks that seem to be on two hosts, the shards come in order."""
    import torch.distributed as dist

    from smdistributed.modelparallel.common.topology import Topology
    from smdistributed.modelparallel.torch.sharding.groups import build_groups
    from smdistributed.modelparallel.torch.sharding.shard_memory import gather_shards
    from smdistributed.modelparallel.torch.sharding.transport import is_hierarchical

    assert is_hierarchical("aabb")
    assert not is_hierarchical("abab")
    assert not is_hierarchical("aaab")
    assert not is_hierarchical("abcd")
    assert not is_hierarchical("aaaa")

    def made(hosts: str | None) -> torch.Tensor:
        groups = build_groups(
            Topology(4),
            4,
            smp.rank(),
            lambda members: dist.new_group(list(members)),
            lambda members, doing: contextlib.nullcontext(),
            hosts,
            lambda group, collectives: None,
        )
        assert (groups.within_host is None) is (hosts is None)
        shards = torch.empty(4, 3)
        gather_shards(groups, torch.full((3,), float(smp.rank())), shards)
        return shards

    want = torch.arange(4.0).unsqueeze(1).expand(4, 3)
    for hosts in (None, "aabb"):
        assert made(hosts).equal(want)


def case_a_scaler_of_torch() -> None:
    """torch's GradScaler unscales what each rank has, and all ranks skip together."""
    reference, model = net(), smp.DistributedModel(net())
    plain = momentum(reference.parameters())
    optimizer = smp.DistributedOptimizer(momentum(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @smp.step
    def scaled(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(inputs), targets)
        model.backward(scaler.scale(loss))
        return loss

    for number, each in enumerate(batches(3)):
        plain.zero_grad()
        optimizer.zero_grad()
        overflows = number == 1
        if not overflows:
            run_plain(reference, body, each)
            plain.step()
        inputs, targets = own_share(each, [0, 0])
        scaled(model, inputs * float("inf") if overflows and smp.dp_rank() else inputs, targets)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6), name


CASES["a_scaler_of_torch"] = case_a_scaler_of_torch
