"""What a script draws between steps: the numbers of plain PyTorch, unless a step draws some too.

A step that draws nothing leaves the generator as it was, another takes one number from it. Which of
both it is goes by that step alone, so a job that is resumed in the middle draws the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import library, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

WIDTH = 4
STEPS = 3


@library.custom_op("drawn_between::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws where no recording sees it."""
    return x + torch.rand(x.shape)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@library.custom_op("drawn_between::quiet", mutates_args=())
def quiet(x: torch.Tensor) -> torch.Tensor:
    """Draws nothing, which no recording sees either."""
    return x + 1.0


@quiet.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layer(nn.Module):
    """Computes in one of the ways."""

    def __init__(self, way: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.way = way
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, self.map(x).tanh())


def nothing(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x


def dropped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5, layer.training)


def by_python(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def by_kernel(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return noisy(x.detach())


def by_quiet_kernel(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return quiet(x.detach())


def decided(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) if bool((x * 0 + layer.sign > 0).all()) else x


def decided_quietly(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool((x > 0).any()) else x


#: What ranks learn of each other in different ways.
SOME = ("in training", "by Python", "by a kernel", "decided quietly")
#: By name, what the last layer does, and in which steps something is drawn.
WAYS: dict[str, tuple[Any, set[int]]] = {
    "nothing": (nothing, set()),
    "in training": (dropped, {0, 2}),
    "between modules": (nothing, set(range(STEPS))),
    "by Python": (by_python, set(range(STEPS))),
    "by a kernel": (by_kernel, set(range(STEPS))),
    "by a quiet kernel": (by_quiet_kernel, set()),
    "as decided": (decided, {0, 2}),
    "decided quietly": (decided_quietly, set()),
}


def _run(name: str, first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Runs steps from one on; returns what each gave, and the generator's state after it."""
    way, _ = WAYS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(*(Layer(each) for each in (nothing, way)))
        net[1].register_buffer("sign", torch.ones(()))
    model = smp.DistributedModel(net)
    evaluates = name == "in training"

    @smp.step
    def step(model: Any, x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return F.dropout(out, 0.5) if name == "between modules" else out

    found = []
    for number in range(first, STEPS):
        model.train(not (evaluates and number % 2))
        net[1].sign.fill_(-1.0 if number % 2 else 1.0)
        x = torch.rand(4, WIDTH)
        given = step(model, x, torch.ones(4)).concat()
        found.append((given.detach(), torch.random.get_rng_state()))
    return found


def _moved(before: torch.Tensor) -> list[torch.Tensor]:
    """Returns where the generator is after a batch, and after a batch and a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(before)
        torch.rand(4, WIDTH)
        quiet = torch.random.get_rng_state()
        torch.randint(2**62, (), dtype=torch.int64)
        return [quiet, torch.random.get_rng_state()]


def drawn_between(names: Sequence[str] = tuple(WAYS)) -> list[str]:
    """Returns what is wrong, by way and step."""
    wrong = []
    for name in names:
        drawing = WAYS[name][1]
        torch.manual_seed(7)
        random.seed(7)
        before = torch.random.get_rng_state()
        whole = _run(name, 0)
        for number, (_, state) in enumerate(whole):
            if not torch.equal(state, _moved(before)[number in drawing]):
                wrong.append(f"{name}: the generator after step {number}")
            before = state
        torch.random.set_rng_state(whole[0][1])
        resumed = _run(name, 1)
        for number, (one, other) in enumerate(zip(whole[1:], resumed, strict=True), 1):
            if not all(map(torch.equal, one, other)):
                wrong.append(f"{name}: step {number} of a resumed job")
    return wrong


class Lazy(nn.Module):
    """Lazy layers, one of which is in a branch, and Python that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.LazyLinear(6), nn.LazyBatchNorm1d()
        self.second, self.other, self.last = nn.LazyLinear(5), nn.LazyLinear(5), nn.Linear(5, 2)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        h = self.norm(self.first(x)).tanh()
        h = self.second(h) if len(self.calls) % 2 else self.other(h)
        return self.last(h).square().mean(1) * len(self.calls)


def lazy_layers() -> list[str]:
    """Returns what is wrong with layers that the first step gives a shape."""
    parts = smp.state.cfg.microbatches
    net, split = Lazy(), Lazy()
    split.last.load_state_dict(net.last.state_dict())
    model = smp.DistributedModel(split)
    step = smp.step(lambda model, x: model(x))
    found = []
    for run in (lambda x: torch.cat([net(part) for part in x.chunk(parts)]), None):
        torch.manual_seed(7)
        losses = [run(x) if run else step(model, x).concat() for x in map(_batch, range(2))]
        found.append((losses, torch.rand(3)))
    (expected, after), (losses, also_after) = found
    wrong = [] if torch.equal(after, also_after) else ["the generator"]
    wrong += [] if net.calls == split.calls else [f"calls: {split.calls}"]
    for one, other in zip(expected, losses, strict=True):
        wrong += [] if torch.allclose(one, other, atol=1e-6) else [f"{other} for {one}"]
    state = model.state_dict()
    wrong += [name for name, each in net.state_dict().items() if not each.allclose(state[name])]
    return wrong


def _batch(number: int) -> torch.Tensor:
    return torch.rand(8, WIDTH) + number
