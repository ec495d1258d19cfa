"""Blocks that have attention and inner layer in one module, as scripts write them.

Each is trained in slices, and by one process with as many examples and microbatches, in double
precision: losses and weights must be the same, with all that is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import graph_cases
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError

WIDTH, HEADS, INNER, VOCAB = 16, 4, 24, 20
STEPS, MICROBATCHES = 2, 2

NORMS = "pre", "post", "both", "root mean square"
RESIDUALS = "sequential", "parallel", "parallel, two norms", "scaled"
ATTENTIONS = "fused", "fused by head", "three", "grouped", "softmax", "torch's"
INNERS = "gelu", "gated", "fused gate", "sequential"
RATES = "none", "residual", "all"
CALLS = "inline", "methods", "functions"
MASKS = "causal", "given", "none"

Member = tuple[str, str, str, str, str, str, str]


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """A block of one of many kinds; the model gives it a mask or none."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.norms, self.residuals, self.attention, self.inner, rates, self.calls, mask = member
        made = RootMeanSquare if self.norms == "root mean square" else nn.LayerNorm
        self.first, self.second = made(WIDTH), made(WIDTH)
        if self.norms == "both":
            self.third, self.fourth = made(WIDTH), made(WIDTH)
        self.n_head, self.n_kv_head = HEADS, HEADS // 2
        self.is_causal = mask == "causal"
        self.attention_rate = 0.2 if rates == "all" else 0.0
        self.dropout = nn.Dropout(0.0 if rates == "none" else 0.1)
        self.inner_dropout = nn.Dropout(0.2 if rates == "all" else 0.0)
        self.scale = nn.Parameter(torch.rand(WIDTH)) if self.residuals == "scaled" else 1.0
        self._make_attention()
        self._make_inner()

    def _make_attention(self) -> None:
        if self.attention == "torch's":
            rate = self.attention_rate
            self.attn = nn.MultiheadAttention(WIDTH, HEADS, rate, batch_first=True)
            return
        if self.attention in ("three", "grouped"):
            kept = WIDTH // 2 if self.attention == "grouped" else WIDTH
            self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
            self.k_proj, self.v_proj = nn.Linear(WIDTH, kept), nn.Linear(WIDTH, kept)
        else:
            self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def _make_inner(self) -> None:
        if self.inner == "sequential":
            self.mlp = nn.Sequential(
                *(nn.Linear(WIDTH, INNER), nn.GELU(), self.inner_dropout),
                nn.Linear(INNER, WIDTH),
            )
            return
        if self.inner == "gated":
            self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        wide = 2 * INNER if self.inner == "fused gate" else INNER
        self.up_proj, self.down_proj = nn.Linear(WIDTH, wide), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.calls == "methods":
            attend, feed = self.attend, self.feed
        elif self.calls == "functions":
            attend = lambda x, mask: attended(self, x, mask)  # noqa: E731
            feed = lambda x: fed(self, x)  # noqa: E731
        else:
            attend, feed = Block.attend.__get__(self), Block.feed.__get__(self)
        if self.residuals.startswith("parallel"):
            if self.norms == "post":
                return self.first(x + self.dropout(attend(x, mask)) + self.dropout(feed(x)))
            first = self.first(x)
            second = self.second(x) if "two" in self.residuals else first
            seen, made = attend(first, mask), feed(second)
            if self.norms == "both":
                seen, made = self.third(seen), self.fourth(made)
            return x + self.dropout(seen) + self.dropout(made)
        if self.norms == "post":
            x = self.first(x + self.dropout(attend(x, mask)) * self.scale)
            return self.second(x + self.dropout(feed(x)) * self.scale)
        seen = attend(self.first(x), mask)
        x = x + self.dropout(self.third(seen) if self.norms == "both" else seen) * self.scale
        made = feed(self.second(x))
        return x + self.dropout(self.fourth(made) if self.norms == "both" else made) * self.scale

    def attend(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return attended(self, x, mask)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return fed(self, x)


def attended(block: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    batch, length, _ = x.shape
    kind = block.attention
    if kind == "torch's":
        hidden = None if mask is None else ~mask[:, 0, 0]
        causal = None
        if block.is_causal:
            causal = torch.full((length, length), -torch.inf).triu(1)
        return block.attn(x, x, x, hidden, need_weights=False, attn_mask=causal)[0]
    if kind in ("three", "grouped"):
        query, key, value = block.q_proj(x), block.k_proj(x), block.v_proj(x)
        query = query.view(batch, length, block.n_head, -1).transpose(1, 2)
        number = block.n_kv_head if kind == "grouped" else block.n_head
        key, value = (each.view(batch, length, number, -1).transpose(1, 2) for each in (key, value))
    elif kind == "fused by head":
        made = block.c_attn(x).view(batch, length, block.n_head, 3, -1)
        query, key, value = made.permute(3, 0, 2, 1, 4)
    else:
        query, key, value = (
            each.unflatten(-1, (block.n_head, -1)).transpose(1, 2)
            for each in block.c_attn(x).chunk(3, -1)
        )
    if kind == "grouped":
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    rate = block.attention_rate if block.training else 0.0
    if kind == "softmax":
        scores = query @ key.mT / key.shape[-1] ** 0.5
        if block.is_causal:
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        mixed = F.dropout(scores.softmax(-1), rate, block.training) @ value
    else:
        mixed = F.scaled_dot_product_attention(
            *(query, key, value, mask), dropout_p=rate, is_causal=block.is_causal
        )
    return block.c_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


def fed(block: Any, x: torch.Tensor) -> torch.Tensor:
    if block.inner == "sequential":
        return block.mlp(x)
    made = block.up_proj(x)
    if block.inner == "gated":
        made = F.silu(block.gate_proj(x)) * made
    elif block.inner == "fused gate":
        gate, made = made.chunk(2, -1)
        made = F.silu(gate) * made
    else:
        made = F.gelu(made)
    return block.down_proj(block.inner_dropout(made))


class Model(nn.Module):
    def __init__(self, member: Member) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(member) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.has_mask = member[-1] == "given"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        mask = (ids > 2)[:, None, None, :] if self.has_mask else None
        if mask is not None:
            mask = mask | (torch.arange(ids.shape[1], device=ids.device) == 0)
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def members() -> Iterator[Member]:
    """Yields those whose parts go together."""
    for member in itertools.product(NORMS, RESIDUALS, ATTENTIONS, INNERS, RATES, CALLS, MASKS):
        if not (member[1] == "scaled" and member[0] == "both"):
            yield member


def sample(number: int, seed: int) -> list[Member]:
    """Returns some of all, in which each part is about as often as others of its kind."""
    return random.Random(seed).sample(list(members()), number)


def batches(size: int) -> Iterator[torch.Tensor]:
    """Yields the examples of all ranks, in other numbers and lengths each time."""
    draws = torch.Generator("cpu").manual_seed(3)
    for examples, length in ((2, 5), (3, 8))[:STEPS]:
        shape = MICROBATCHES * size * examples, length
        ids = torch.randint(0, VOCAB, shape, generator=draws, device="cpu")
        yield ids.to(torch.get_default_device())


def trained(
    make: Callable[[], nn.Module],
    size: int,
    *,
    is_split: bool,
    prepare: Callable[[Any], object] = lambda module: None,
    rounds: int = 1,
    cuda_graphs: bool = False,
) -> dict[str, Any]:
    """Returns the losses of all microbatches, in their order, and what becomes of the weights.

    Args:
        make: makes the model.
        size: how many ranks are compared.
        is_split: they make it together, each with its share of the examples.
        prepare: changes the model before it is split.
        rounds: how often it goes through the batches.
        cuda_graphs: passes are captured.
    """
    gc.collect()  # models that still live have a place in the keys of random numbers
    torch.manual_seed(5)
    if is_split:
        sample_inputs = (torch.zeros(2, 6, dtype=torch.int64),)
        with smp.tensor_parallelism(auto=True, sample_inputs=sample_inputs):
            module = make()
    else:
        module = make()
    prepare(module)
    model = smp.DistributedModel(module)
    groups = [name for name, each in module.named_modules() if "_smp_found" in vars(each)]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))

    @smp.step(cuda_graphs=cuda_graphs)
    def train(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        model.backward(loss)
        return loss

    losses = []
    for ids in itertools.chain.from_iterable(batches(size) for _ in range(rounds)):
        optimizer.zero_grad()
        if is_split:
            ids = ids.unflatten(0, (MICROBATCHES, size, -1))[:, smp.tp_rank()].flatten(0, 1)
        own = [each.item() for each in train(model, ids).outputs]
        everyones = smp.allgather(own, smp.TP_GROUP) if is_split else [own]
        losses += [loss for together in zip(*everyones, strict=True) for loss in together]
        optimizer.step()
    norms = {name: each.norm().item() for name, each in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "groups": groups}


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Returns what of a training is not that of another one; nothing if all is."""
    for part in ("losses", "norms"):
        if found[part] != pytest.approx(wanted[part], rel=1e-9, abs=1e-12):
            return part
    return ""


@in_double_precision()
def outcomes_of(
    make: Callable[[Any], nn.Module], chosen: Sequence[Any], size: int, *, is_split: bool
) -> list[dict[str, Any]]:
    """Returns what becomes of the model of each member, or why it is refused."""
    found = []
    for member in chosen:
        try:
            found.append(trained(functools.partial(make, member), size, is_split=is_split))
        except SMPError as error:
            found.append({"refused": str(error)})
    return found


def outcomes(chosen: list[Member], size: int, is_split: bool) -> list[dict[str, Any]]:
    """Returns what becomes of each, or why it is refused."""
    return outcomes_of(Model, chosen, size, is_split=is_split)


@in_double_precision()
def compiled(member: Member) -> None:
    """Blocks that are compiled in place give the numbers of those that run as they are written."""
    make = functools.partial(Model, (*member[:4], "none", *member[5:]))
    want = trained(make, 2, is_split=True)
    operations: set[str] = set()

    def backend(graph: Any, inputs: Any) -> Any:
        operations.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def prepare(module: Any) -> None:
        for block in module.blocks:
            block.compile(backend=backend)

    torch.compiler.reset()
    got = trained(make, 2, is_split=True, prepare=prepare)
    assert not difference(got, want)
    assert any("gelu" in each or "silu" in each for each in operations), operations


@in_double_precision()
def captured(member: Member) -> None:
    """Passes that are captured give the numbers of those that are not."""
    check_captured(functools.partial(Model, (*member[:4], "none", *member[5:])))


def check_captured(make: Callable[[], nn.Module]) -> None:
    """Checks that passes of a model that are captured give the numbers of those that are not."""
    want = trained(make, 2, is_split=True, rounds=5)
    with graph_cases.captured() as (begun, reasons):
        got = trained(make, 2, is_split=True, rounds=5, cuda_graphs=True)
    assert not difference(got, want)
    assert begun, reasons.found


@in_double_precision()
def checkpointed(member: Member) -> None:
    """Blocks that are computed again exchange again, and draw what they drew."""

    def prepare(module: Any) -> None:
        smp.set_activation_checkpointing(module.blocks)

    make = functools.partial(Model, member)
    want = trained(make, 2, is_split=True)
    got = trained(make, 2, is_split=True, prepare=prepare)
    assert not difference(got, want)


@in_double_precision()
def hooked(member: Member) -> None:
    """Hooks on modules in a block see whole activations, once for each call, or are refused."""
    seen: list[torch.Tensor] = []
    x = torch.randn(2, 5, WIDTH)
    member = (*member[:4], "none", *member[5:])
    for is_early in (True, False):
        torch.manual_seed(5)
        whole = Model(member).blocks[0]
        with smp.tensor_parallelism(auto=True, sample_inputs=(x,)):
            module = nn.Sequential(Model(member).blocks[0], nn.Linear(WIDTH, WIDTH))
        block = module[0]
        whole.load_state_dict(block.state_dict())
        for each in (block, whole) if is_early else (whole,):
            each.second.register_forward_hook(lambda module, given, made: seen.append(made))
        smp.DistributedModel(module)
        assert ("_smp_found" in vars(block)) is not is_early
        if is_early:
            seen.clear()  # the model was tried
            torch.testing.assert_close(block(x), whole(x))
            torch.testing.assert_close(*seen)
        else:
            torch.testing.assert_close(block(x), whole(x))
            block.second.register_forward_hook(lambda module, given, made: seen.append(made))
            with pytest.raises(UnsupportedError, match=r"second has others.*Exclude the first"):
                block(x)


class Dropping(nn.Module):
    """Drops half of what it adds to what it is given, and goes on with all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.5, self.training)
        return x + made


@in_double_precision()
def dropped_outside_of_steps(member: Member) -> None:
    """What every rank has whole is dropped alike, also where each draws from its own generator."""
    torch.manual_seed(5)
    x = torch.randn(3, 4, WIDTH)
    with smp.tensor_parallelism(auto=True, sample_inputs=(x,)):
        module = nn.Sequential(Dropping(), nn.Linear(WIDTH, 2 * WIDTH))
    model = smp.DistributedModel(module)
    assert "_smp_found" in vars(module[0])
    torch.manual_seed(smp.rank())
    added = module[0](x) - x
    model.eval()
    whole = module[0](x) - x
    is_dropped = added.abs() < 1e-9
    assert 0.2 < is_dropped.double().mean() < 0.8
    torch.testing.assert_close(added, torch.where(is_dropped, 0.0, 2 * whole))
