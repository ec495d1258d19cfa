"""Mixtures whose stacked experts ranks have between them, beside one process.

A stack is called with tokens, the experts of each and their weights. ``SPREAD`` are ways to write
one whose experts can be spread; ``WHOLE`` look like it and compute something that ranks cannot have
between them, so they stay whole, and exact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.tensor_parallel.experts.spread import SpreadExperts

WIDTH, INNER, EXPERTS, CHOICES = 6, 10, 4, 2
STEPS = 3
#: Of a normalized number: above it are some of twenty.
FEW = 1.5


class Stack(nn.Module):
    """Computes each expert on the tokens that go to it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            token, choice = torch.where(index == number)
            made = self.expert(number, x[token], weights[token, choice, None])
            out.index_add_(0, token, made)
        return out

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * F.linear(F.silu(F.linear(x, self.up[number])), self.down[number])


class Hit(Stack):
    """Leaves out experts that get nothing, which it asks the tokens for."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        with torch.no_grad():
            mask = F.one_hot(index, num_classes=self.num_experts).permute(2, 1, 0)
            hit = mask.sum((-1, -2)).nonzero()
        out = torch.zeros_like(x)
        for number in hit[:, 0]:
            choice, token = torch.where(mask[number])
            out.index_add_(0, token, self.expert(number, x[token], weights[token, choice, None]))
        return out


class Batched(Stack):
    """Gathers the weights of each choice."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        inner = torch.einsum("tkiw,tw->tki", self.up[index], x)
        made = torch.einsum("tkwi,tki->tkw", self.down[index], F.gelu(inner))
        return (made * weights[..., None]).sum(1)


class Sorted(Stack):
    """Sorts choices by expert, and keeps tokens of three dims."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        order = index.reshape(-1).argsort()
        token = order // index.shape[1]
        counts = index.reshape(-1).bincount(minlength=self.num_experts).tolist()
        scale = weights.reshape(-1)[order, None]
        parts = zip(flat[token].split(counts), scale.split(counts), strict=True)
        made = [self.expert(number, *each) for number, each in enumerate(parts)]
        return torch.zeros_like(flat).index_add(0, token, torch.cat(made)).view_as(x)


class Biased(Stack):
    """Has biases, and weighs tokens before its functions that are not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER))

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(
            torch.tanh(F.linear(weight * x, self.up[number], self.bias[number])), self.down[number]
        )


class Single(Stack):
    """Rounds to single precision on its way."""

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().expert(number, x.float().to(x.dtype), weight)


class Named(Hit):
    """Is called by names, in another order."""

    def forward(self, *, index: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> Any:
        return super().forward(x, index, weights)


class Dropping(Stack):
    """Takes no more than some tokens an expert."""

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        here = torch.arange(len(x), device=x.device)[:, None] < 3
        return super().expert(number, x, weight) * here


class Normalized(Stack):
    """Divides by what its tokens have in common."""

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().expert(number, x - x.mean(0) if len(x) else x, weight)


class Numbered(Stack):
    """Knows which of all experts it is."""

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().expert(number, x, weight) * (1 + number)


class Mixed(Stack):
    """Has experts that read the weights of others."""

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().expert(number, x, weight) + weight * x * self.up.mean()


class Compared(Stack):
    """Weighs the choices of a token against each other."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        return super().forward(x, index, weights.softmax(-1))


class Loading(Stack):
    """Keeps how many tokens each expert got."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        self.load = index.reshape(-1).bincount(minlength=EXPERTS)
        return super().forward(x, index, weights)


class Listing(Stack):
    """Adds to a list that others may read."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        self.loads.append(index.reshape(-1).bincount(minlength=EXPERTS))
        return super().forward(x, index, weights)


class Shrinking(Stack):
    """Changes its weights, which code around it may read."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        out = super().forward(x, index, weights)
        with torch.no_grad():
            weights.mul_(1)
        return out


class OtherwiseEvaluated(Stack):
    """Computes something else in evaluation."""

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x):
            x = x - x.mean(0)
        return super().expert(number, x, weight)


class Crowded(Stack):
    """Divides by the number of tokens."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        return super().forward(x, index, weights) / math.sqrt(1 + len(x))


SPREAD = (Stack, Hit, Batched, Sorted, Biased, Single, Named)
WHOLE = (
    Dropping,
    Normalized,
    Numbered,
    Mixed,
    Compared,
    Loading,
    Listing,
    Shrinking,
    OtherwiseEvaluated,
    Crowded,
)


class Block(nn.Module):
    """Routes tokens to experts.

    Args:
        kind: of the experts.
        favourite: the expert that gets most tokens; None where all get some.
        checkpointed: computes experts again in the backward pass.
        few: the experts see few tokens, of some microbatches none.
    """

    def __init__(
        self,
        kind: type[Stack],
        favourite: int | None = None,
        *,
        checkpointed: bool = False,
        few: bool = False,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = kind()
        self.checkpointed = checkpointed
        self.few = few
        if favourite is not None:
            with torch.no_grad():
                self.router.bias[favourite] += 30
                self.router.bias[(favourite + 1) % EXPERTS] += 20

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x)
        scores = self.router(tokens).flatten(0, 1).softmax(-1)
        weights, index = scores.topk(CHOICES)
        keyword = isinstance(self.experts, Named)
        given = tokens if isinstance(self.experts, Sorted) else tokens.flatten(0, 1)
        if keyword:
            made = self.experts(x=given, index=index, weights=weights)
        elif self.few:
            seen = given[:, 0] > FEW
            made = torch.zeros_like(given)
            made[seen] = self.experts(given[seen], index[seen], weights[seen])
        elif self.checkpointed:
            made = checkpoint(self.experts, given, index, weights, use_reentrant=False)
        else:
            made = self.experts(given, index, weights)
        return x + made.view_as(x)


class Model(nn.Module):
    def __init__(self, kinds: Iterable[type[Stack]], **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, **options) for kind in kinds)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@smp.step
def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def batch(step: int, source: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1000 * step + source)
    made = torch.randn(4, 5, WIDTH + 3, generator=draws, dtype=torch.float64)
    return made[..., :WIDTH], made[..., WIDTH:]


def trained_apart(plain: nn.Module, steps: int, microbatches: int, sources: int) -> None:
    """Trains a model in this process on the batches of all ranks."""
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for source in range(sources):
            x, y = batch(step, source)
            for part in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
                loss = F.mse_loss(plain(part[0]), part[1]) / sources / microbatches
                loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()


def beside_one_process(
    kinds: list[str], microbatches: int, *, prescaled: bool = False, **options: Any
) -> tuple[float, int]:
    """Returns how far parameters are from those of one process, and how many stacks are spread."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = Model([globals()[each] for each in kinds], **options).double()
        model = smp.DistributedModel(copy.deepcopy(plain))
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        sources = smp.rdp_size() if prescaled else smp.dp_size()
        trained_apart(plain, STEPS, microbatches, sources)
        source = smp.rdp_rank() if prescaled else smp.dp_rank()
        for step in range(STEPS):
            optimizer.zero_grad()
            train(model, *batch(step, source))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found = model.state_dict()
    expected = plain.state_dict()
    assert list(found) == list(expected)
    far = max(float((found[each].cpu() - expected[each]).abs().max()) for each in expected)
    spread = sum(isinstance(each, SpreadExperts) for each in model.get_module().modules())
    return far, spread
