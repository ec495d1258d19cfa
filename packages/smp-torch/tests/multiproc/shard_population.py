"""Kinds of modules x what a script does with parameters: each trial is exact or refused."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import torch
from half_cases import adam, batches
from reference import own_share, run_plain
from shard_cases import Checkpointed, Cut, Functions, Recurrent, Tied
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

STEPS = 3


class Embedded(nn.Module):
    """Rows that are looked up, some of them never."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        places = (inputs.abs() * 3).long().clamp(max=10)
        return self.head(self.table(places).mean(1))


class Normed(nn.Module):
    """Norms, a convolution, and a weight that is computed from parameters in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(inputs.unflatten(1, (2, 4)))).flatten(1)
        return self.head(torch.tanh(self.linear(hidden)))


class Twice(nn.Module):
    """One layer that runs several times, and one through functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            inputs = torch.tanh(self.again(inputs))
        halved = {name: each * 0.5 for name, each in self.other.named_parameters()}
        return self.head(torch.func.functional_call(self.other, halved, (inputs,)))


class Autocast(nn.Module):
    """Products in bfloat16, whose weights are cast in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.layers(inputs)
        return self.head(hidden.float())


class Encoder(nn.Module):
    """A block of torch's own, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        # Without the bias of keys, whose gradient is rounding.
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(torch.stack([inputs, inputs.flip(1)], 1))[:, 0])


class Indexed(nn.Module):
    """Rows, columns and views of parameters, kept over other modules' calls."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(6, 8, 8) / 3)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, *_, last = self.bank.unbind()
        columns = self.bank[2, :, ::2]
        inputs = self.middle(torch.tanh(inputs @ first))
        mixed = torch.einsum("bi,io->bo", inputs, last.t().contiguous())
        return self.head(mixed + (inputs @ columns).repeat(1, 2))


class Doubled(nn.Module):
    """Another floating-point type beside, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(8, 8).double()
        self.waves = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.fine(inputs.double()).float()
        return self.head((hidden.to(torch.complex64) @ self.waves).real)


KINDS: tuple[type[nn.Module], ...] = (
    *(Tied, Cut, Checkpointed, Recurrent, Functions, Embedded),
    *(Normed, Twice, Autocast, Encoder, Indexed, Doubled),
)


def plain_body(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(inputs), targets)
    model.backward(loss)
    return loss


def penalty(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The script reads parameters in the body of the step."""
    module = model.get_module() if hasattr(model, "get_module") else model.module
    loss = F.cross_entropy(model(inputs), targets)
    norms = [each.abs().square().mean() for each in module.parameters()]
    loss = loss + 0.01 * torch.stack([each.float() for each in norms]).sum()
    model.backward(loss)
    return loss


def two_passes(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Two backward passes for a microbatch."""
    first = F.cross_entropy(model(inputs), targets)
    model.backward(first)
    second = model(inputs * 0.5).square().mean()
    model.backward(second)
    return first


def nothing(module: nn.Module, model: Any, step: int) -> None:
    """The script does nothing between steps."""


def hooks(module: nn.Module, model: Any, step: int) -> None:
    """Gradients of one parameter are halved when they are made."""
    if step == 0:
        for each in (module, model.get_module()):
            next(iter(each.parameters())).register_hook(lambda gradient: gradient * 0.5)


def evaluations(module: nn.Module, model: Any, step: int) -> None:
    """The model is called outside of steps, without and with inference mode."""
    inputs = batches(1)[0][0]
    with torch.no_grad():
        assert torch.allclose(model(inputs), module(inputs), atol=1e-5)
    with torch.inference_mode():
        assert torch.allclose(model(inputs), module(inputs), atol=1e-5)


def states(module: nn.Module, model: Any, step: int) -> None:
    """The whole state is read, changed and loaded."""
    for each in (module, model):
        each.load_state_dict({name: value * 0.9 for name, value in each.state_dict().items()})


def freezing(module: nn.Module, model: Any, step: int) -> None:
    """The first parameter is frozen in every other step."""
    for each in (module, model.get_module()):
        next(iter(each.parameters())).requires_grad_(step % 2 == 1)


def reads(module: nn.Module, model: Any, step: int) -> None:
    """The script reads parameters by itself."""
    total = sum(each.abs().sum().item() for each in model.parameters())
    assert abs(total - sum(each.abs().sum().item() for each in module.parameters())) < 1e-3


def writes(module: nn.Module, model: Any, step: int) -> None:
    """The script writes to parameters by itself."""
    with torch.no_grad():
        for one in (model, module):
            for each in one.parameters():
                each.mul_(0.9)


def data_writes(module: nn.Module, model: Any, step: int) -> None:
    """The same past autograd."""
    for one in (model, module):
        for each in one.parameters():
            each.data.mul_(0.9)


def replacement(module: nn.Module, model: Any, step: int) -> None:
    """A module is put in the place of another one."""
    if step == 1:
        torch.manual_seed(3)
        made = nn.Linear(8, 3)
        for each in (module, model.get_module()):
            if not isinstance(each.head, nn.Linear) or each.head.in_features != 8:
                return
            head = nn.Linear(8, 3)
            head.load_state_dict(made.state_dict())
            each.head = head.requires_grad_(False)


BODIES = (plain_body, penalty, two_passes)
BETWEEN = (
    *(nothing, hooks, evaluations, states, freezing),
    *(reads, writes, data_writes, replacement),
)


def trial(
    kind: type[nn.Module], body: Callable[..., Any], between: Callable[..., None]
) -> tuple[str, str]:
    """Returns whether the trial was exact, refused or wrong, and what was said."""
    torch.manual_seed(13)
    reference = kind()
    torch.manual_seed(13)
    model = smp.DistributedModel(kind())
    try:
        plain = adam(reference.parameters())
        optimizer = smp.DistributedOptimizer(adam(model.parameters()))
        step = smp.step(body)
        for number, each in enumerate(batches(STEPS)):
            between(reference, model, number)
            plain.zero_grad()
            optimizer.zero_grad()
            want = run_plain(reference, body, each)
            got = step(model, *own_share(each, [0, 0]))
            for one, other in zip(got.outputs, want, strict=True):
                if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
                    return "wrong", f"loss {one.item()} for {other.item()} in step {number}"
            found = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            if not torch.allclose(found.float(), expected.float(), rtol=1e-4):
                return "wrong", f"norm {found.item()} for {expected.item()} in step {number}"
            plain.step()
            optimizer.step()
        state = model.state_dict()
        for name, value in reference.state_dict().items():
            if not torch.allclose(state[name].to(value.device), value, rtol=1e-3, atol=1e-4):
                return "wrong", name
    except SMPError as error:
        return "refused", str(error)
    return "exact", ""


def survey() -> dict[str, Any]:
    """Tries all; returns how many were what, and what was wrong."""
    counts: collections.Counter[str] = collections.Counter()
    told: dict[str, str] = {}
    refused: set[str] = set()
    for kind, body, between in itertools.product(KINDS, BODIES, BETWEEN):
        verdict, said = trial(kind, body, between)
        counts[verdict] += 1
        name = f"{kind.__name__} {body.__name__} {between.__name__}"
        if verdict == "wrong":
            told[name] = said
        if verdict == "refused":
            refused.add(between.__name__)
    return {"counts": dict(counts), "wrong": told, "refused": sorted(refused)}
