"""Pruning and norms of weights that are put on before wrapping and taken off after it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import smdistributed.modelparallel.torch as smp

WIDTH = 4
Put = Callable[[nn.Module], object]


def _unparametrized(module: nn.Module) -> object:
    return parametrize.remove_parametrizations(module, "weight")


#: What is put on a layer, and what takes it off.
KINDS: dict[str, tuple[Put, Put]] = {
    "pruned": (
        lambda each: prune.l1_unstructured(each, "weight", amount=0.5),
        lambda each: prune.remove(each, "weight"),  # type: ignore[no-untyped-call]
    ),
    "pruned_rows": (
        lambda each: prune.ln_structured(each, "weight", amount=0.5, n=2, dim=0),
        lambda each: prune.remove(each, "weight"),  # type: ignore[no-untyped-call]
    ),
    "pruned_bias": (
        lambda each: prune.identity(each, "bias"),  # type: ignore[no-untyped-call]
        lambda each: prune.remove(each, "bias"),  # type: ignore[no-untyped-call]
    ),
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "parametrized_norm": (parametrizations.weight_norm, _unparametrized),
    "orthogonal": (parametrizations.orthogonal, _unparametrized),
}


def _made(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    KINDS[kind][0](net[0])
    KINDS[kind][0](net[2])
    return net


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _body(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def compare(kind: str, steps: int) -> None:
    """States and further steps are those of plain PyTorch after the same calls."""
    net, plain = _made(kind), _made(kind)
    if smp.pp_size() > 1:
        smp.set_partition(net[2], 1)
    model, step = smp.DistributedModel(net), smp.step(_body)
    draws = torch.Generator().manual_seed(1)

    def train(number: int) -> tuple[Any, Any]:
        mine = smp.DistributedOptimizer(sgd(model.parameters()))
        theirs = sgd(plain.parameters())
        for _ in range(number):
            x = torch.randn(8 * smp.dp_size(), WIDTH, generator=draws)
            model.zero_grad()
            theirs.zero_grad()
            step(model, x.chunk(smp.dp_size())[smp.dp_rank()])
            plain(x).square().mean().backward()
            mine.step()
            theirs.step()
        return mine, theirs

    def check() -> None:
        state, wanted = model.state_dict(), plain.state_dict()
        assert list(state) == list(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)

    mine, theirs = train(steps)
    for each in (plain, model.get_module()):
        KINDS[kind][1](each[0])
        KINDS[kind][1](each[2])
    check()
    if kind.startswith("pruned") and smp.tp_size() == 1:  # others have new parameters
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
    if model.partitioned:
        assert set(model.local_state_dict()) <= {*plain.state_dict(), "_smp_is_partial"}
        folder = smp.allgather(tempfile.mkdtemp(), smp.WORLD)[0]
        smp.save_checkpoint(folder, "one", model=model)
    model.load_state_dict(plain.state_dict())
    train(2)
    check()
