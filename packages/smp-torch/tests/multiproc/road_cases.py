"""Parameters in shards that are read and written by all roads, at all places and moments.

Each trial runs beside plain PyTorch. It is *exact*, *refused* by an error of the library that names
the parameter, *unclear* where the error is another one, or *wrong*.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from roads import READS, UNSEEN_WHILE_GATHERED, WRITES, Road, compiled_roads
from torch import nn

import smdistributed.modelparallel.torch as smp

WIDTH = 4


class Part(nn.Module):
    """Has the parameters that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.road: Any = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.bias * (self.weight.sum() + 1)
        return states if self.road is None else states + self.road(self)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(3, WIDTH), Part(), nn.Linear(WIDTH, 3)
        self.road: Any = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = self.part(self.first(states))
        if self.road is not None:
            states = states + self.road(self.part)
        return self.last(states)


#: Where and when a road is taken.
PLACES = (
    *("in its module", "in the parent", "in the step", "after backward", "in a hook"),
    *("in an evaluation", "between steps"),
)


def is_read_in_body(place: str) -> bool:
    return place in ("in the step", "after backward")


class Trial:
    """Two steps of a model in shards, and of plain PyTorch beside it.

    Args:
        road: what is done with the parameter.
        name: of the parameter.
        place: where.
    """

    def __init__(self, road: Road, name: str, place: str) -> None:
        torch.manual_seed(3)
        self.plain = Net()
        torch.manual_seed(3)
        self.model = smp.DistributedModel(Net())
        self._take = lambda part: road(getattr(part, name))
        self._place = place
        torch.manual_seed(smp.dp_rank())
        self.states = torch.randn(8, 3)
        self.optimizers = [
            torch.optim.SGD(self.plain.parameters(), lr=0.1),
            smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1)),
        ]
        for net in (self.plain, self.model.get_module()):
            self._prepare(net)

        @smp.step
        def train(model: Any, states: torch.Tensor) -> Any:
            return self._body(model, model.get_module(), states, model.backward)

        self._train = train

    def _prepare(self, net: Any) -> None:
        if self._place == "in its module":
            net.part.road = self._value
        elif self._place == "in the parent":
            net.road = self._value
        elif self._place == "in a hook":
            net.part.register_forward_hook(lambda module, args, out: out + self._value(module))

    def _value(self, part: Any) -> Any:
        found = self._take(part)
        return 0.0 if found is None else found * 0.01

    def _body(self, model: Any, net: Any, states: torch.Tensor, backward: Any) -> Any:
        loss = model(states).square().mean()
        if self._place == "in the step":
            loss = loss + self._value(net.part)
        backward(loss)
        after = self._value(net.part) if self._place == "after backward" else 0.0
        return loss.detach(), torch.as_tensor(after).detach().float()

    def run(self) -> bool:
        """Returns whether all is as of plain PyTorch."""
        for _ in range(2):
            if not self._step():
                return False
        state = self.model.state_dict()
        return all(
            torch.allclose(state[name].cpu(), value.cpu(), atol=1e-5, rtol=1e-4)
            for name, value in self.plain.state_dict().items()
        )

    def _step(self) -> bool:
        parts = self.plain.part, self.model.get_module().part
        if self._place == "between steps":
            found = [torch.as_tensor(self._value(each)).detach() for each in reversed(parts)]
            if not torch.allclose(*found, atol=1e-5, rtol=1e-4):
                return False
        if self._place == "in an evaluation":
            for net, part in zip((self.plain, self.model), parts, strict=True):
                part.road = self._value
                net.eval()
            with torch.no_grad():
                got, wanted = self.model(self.states), self.plain(self.states)
            for net, part in zip((self.plain, self.model), parts, strict=True):
                part.road = None
                net.train()
            if not torch.allclose(got, wanted, atol=1e-5, rtol=1e-4):
                return False
        for each in self.optimizers:
            each.zero_grad()
        got = [each.outputs for each in self._train(self.model, self.states)]
        want = self._plain_step()
        nn.utils.clip_grad_norm_(self.plain.parameters(), smp.state.cfg.sdp_gradient_clipping)
        for each in self.optimizers:
            each.step()
        return torch.allclose(torch.tensor(got).T, torch.tensor(want), atol=1e-5, rtol=1e-4)

    def _plain_step(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Steps of all ranks, whose gradients are averaged; returns what the own one returns."""
        own: list[Any] = []
        size, parts = smp.dp_size(), smp.state.cfg.microbatches
        for rank in range(size):
            torch.manual_seed(rank)
            for states in torch.randn(8, 3).chunk(parts):
                found = self._body(
                    self.plain, self.plain, states, lambda loss: (loss / parts / size).backward()
                )
                own += [found] * (rank == smp.dp_rank())
        return own


#: What an error of the library says of a parameter, also where TorchScript tells it again.
CLEAR = re.compile(
    r"(part\.(weight|bias)|a parameter).*(clone\(\)|detach\(\)|state_dict|register_hook)", re.S
)
#: What others say between steps, where nothing of the library is called: PyTorch of a pointer, and
#: NumPy of an array of the whole, which nobody would get back.
OF_OTHERS = ("its data is not allocated yet", "output array is read-only")


def outcome(road: Road, name: str, place: str) -> tuple[str, str]:
    """Returns what became of a trial, and what was said."""
    try:
        return ("exact" if Trial(road, name, place).run() else "wrong"), ""
    except Exception as error:  # TorchScript and compilers tell the library's in their own
        is_clear = CLEAR.search(str(error)) is not None
        is_clear |= place == "between steps" and any(each in str(error) for each in OF_OTHERS)
        return ("refused" if is_clear else "unclear"), f"{type(error).__name__}: {error}"


def cases() -> Iterator[tuple[str, Road, str, str]]:
    """Yields name of a road, road, name of the parameter, and place."""
    for kind, roads in (("read", READS), ("write", WRITES)):
        for label, name, place in itertools.product(roads, ("weight", "bias"), PLACES):
            if kind == "write" and label in UNSEEN_WHILE_GATHERED and place != "between steps":
                continue
            yield f"{kind}: {label}", roads[label], name, place


Told = tuple[dict[str, int], list[Any]]


def tried(cases: Iterable[tuple[str, Road, str, str]]) -> Told:
    """Tries cases; returns how many came to which end, and those of no good end.

    Args:
        cases: road with its name, name of the parameter, and place.
    """
    counts: Counter[str] = Counter()
    told = []
    for label, road, name, place in cases:
        end, said = outcome(road, name, place)
        counts[end] += 1
        if end not in ("exact", "refused"):
            told.append((label, name, place, end, said[:300]))
    return dict(counts), told


def population(first: int, stride: int) -> Told:
    """Tries each ``stride``-th case, from ``first`` on."""
    return tried(itertools.islice(cases(), first, None, stride))


def named(roads: Sequence[str]) -> Told:
    """Tries some roads in the forward of a module, and between steps."""
    return tried(
        (each, {**WRITES, **READS}[each], name, place)
        for each, (name, place) in itertools.product(
            roads,
            itertools.product(("weight", "bias"), ("in its module", "between steps")),
        )
    )


def by_extension() -> Told:
    """Tries code that this machine's compiler makes."""
    made = compiled_roads()
    return tried(
        (label, road, name, place)
        for (label, road), name, place in itertools.product(
            made.items(), ("weight", "bias"), PLACES
        )
    )
