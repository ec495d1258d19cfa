"""Gradients that are differentiated themselves, through modules that ranks compute together.

Penalties on gradients of inputs and of activations, and higher derivatives, on examples that are
others on each rank: the gradients of all parameters are those of one process.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from reference import own_share, run_plain
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

WIDTH = 8


def gradient_of(result: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.autograd.grad(result.sum(), of, create_graph=True)[0]
    return found


def asked(states: torch.Tensor) -> torch.Tensor:
    return states.detach().clone().requires_grad_()


def penalty(model: Any, states: torch.Tensor) -> torch.Tensor:
    states = asked(states)
    slopes = gradient_of(model(states), states)
    return (slopes.flatten(1).norm(dim=1) - 1).square().mean()


def penalty_and_loss(model: Any, states: torch.Tensor) -> torch.Tensor:
    states = asked(states)
    result = model(states)
    return result.square().mean() + 10 * gradient_of(result, states).square().mean()


def second(model: Any, states: torch.Tensor) -> torch.Tensor:
    states = asked(states)
    slopes = gradient_of(model(states), states)
    return (gradient_of(slopes[..., 0], states)[..., 0] - slopes[..., 1]).square().mean()


def twice_the_model(model: Any, states: torch.Tensor) -> torch.Tensor:
    states = asked(states)
    slopes = gradient_of(model(states).tanh(), states)
    return model(states - 0.1 * slopes).square().mean()


def of_what_comes_before(model: Any, states: torch.Tensor) -> torch.Tensor:
    middle = model(states)
    slopes = gradient_of(model(middle), middle)
    return slopes.square().mean() + middle.mean()


def not_used(model: Any, states: torch.Tensor) -> torch.Tensor:
    states = asked(states)
    result = model(states)
    return result.square().mean() + gradient_of(result, states).detach().mean()


LOSSES: Mapping[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    each.__name__: each
    for each in (penalty, penalty_and_loss, second, twice_the_model, of_what_comes_before, not_used)
}


class Attention(nn.Module):
    """Written out: what is fused has no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        parts = (each(states) for each in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (4, 2)).transpose(-3, -2) for each in parts)
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return states + self.last((weights @ value).transpose(-3, -2).flatten(-2))


def inner() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.inner = Attention(), inner()
        self.first, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = self.attention(self.first(states))
        return states + self.inner(self.other(states))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.free = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for each in self.maps:
            states = F.softplus(each(states))
        return self.free(states)


NETS: Mapping[str, Callable[[], nn.Module]] = {"inner": inner, "block": Block, "mixed": Mixed}


def outcome(net: str, loss: str) -> tuple[str, str]:
    torch.manual_seed(2)
    module = NETS[net]().double()
    plain = copy.deepcopy(module)
    smp.set_tensor_parallelism(module, auto=True)
    batch = torch.randn(2 * smp.state.cfg.microbatches * smp.dp_size(), 3, WIDTH).double()

    def body(model: Any, states: torch.Tensor) -> torch.Tensor:
        found = LOSSES[loss](model, states)
        model.backward(found)
        return found.detach()

    run_plain(plain, body, [batch])
    try:
        model = smp.DistributedModel(module)
        for _ in range(2):
            model.zero_grad()
            # A prescaled batch is all ranks' examples.
            share = [batch] if smp.state.cfg.prescaled_batch else own_share([batch], [0])
            smp.step(body)(model, *share)
        gradients = {name: each.grad for name, each in model.named_parameters()}
    except SMPError as error:
        return "refused", str(error)
    except Exception as error:
        return "unclear", f"{type(error).__name__}: {error}"
    for name, each in plain.named_parameters():
        found = gradients[name]
        if (found is None) is not (each.grad is None):
            return "wrong", f"{name}: {found}, not {each.grad}"
        if each.grad is not None and not torch.allclose(found, each.grad, rtol=1e-9, atol=1e-12):
            return "wrong", f"{name}: off by {(found - each.grad).abs().max()}"
    return "exact", ""


def ways() -> Iterator[tuple[str, str]]:
    yield from itertools.product(NETS, LOSSES)


def population(part: int, parts: int) -> dict[str, Any]:
    """Tries some of all; returns how many came to which end, and what was told of others."""
    counts: Counter[str] = Counter()
    told = {}
    for way in [*ways()][part::parts]:
        end, said = outcome(*way)
        counts[end] += 1
        if end != "exact":
            told[", ".join(way)] = (end, said[:400])
    return {"counts": dict(counts), "told": told}
