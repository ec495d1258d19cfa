"""Proofs of slices come to the same verdict on any processor, and refuse splits that are wrong."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.torch.tensor_parallel.auto import proof, trial_slices
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import (
    COMMON,
    MEAN,
    SAME,
    SUM,
    RefutedError,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan
from smdistributed.modelparallel.torch.tensor_parallel.auto.proof import prove
from smdistributed.modelparallel.torch.tensor_parallel.auto.proven import Proof
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template
from smdistributed.modelparallel.torch.tensor_parallel.auto.trial_slices import tried
from smdistributed.modelparallel.torch.trial.rounding import Rounding

WIDTH, INNER, HEADS = 12, 24, 4
FEED_FORWARD = Plan(columns=("up",), rows=("down",))
#: Each is the arithmetic of another processor.
PROCESSORS = [
    pytest.param(range(1), id="one"),
    pytest.param(range(1, 25), id="many", marks=pytest.mark.slow),
]

Function = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Two maps, and what is done between them and after them."""

    def __init__(self, inner: Function = F.gelu, last: Function | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.inner, self.last = inner, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.down(self.inner(self.up(x)))
        return result if self.last is None else self.last(result)


class Gated(Block):
    """Two maps side by side before the last one, behind a norm in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = self.scale * norm.to(x.dtype)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Attention whose queries and keys have norms of their own, so that large ones saturate it."""

    def __init__(self, norm: bool = False, scores_of: Function | None = None) -> None:
        super().__init__()
        self.num_heads = HEADS
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH // HEADS) if norm else nn.Identity()
        self.scores_of = scores_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            each(x).view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        query, key, value = self.norm(heads[0]), self.norm(heads[1]), heads[2]
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if self.scores_of is not None:
            scores = self.scores_of(scores)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Attention whose query, key and value are one map."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            each.reshape(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)
            for each in self.all(x).chunk(3, -1)
        ]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


MAPS = {"columns": ("query", "key", "value"), "rows": ("out",)}
OF_HEADS = Plan(**MAPS, divided=(("", "num_heads"),))
OF_FUSED = Plan(
    ("all",), ("out",), divided=(("", "num_heads"),), fused=(("all", (WIDTH, WIDTH, WIDTH)),)
)


def _proven(module: nn.Module, plan: Plan, shape: tuple[int, ...] = (2, 5, WIDTH)) -> Proof:
    call = Call(((torch.empty(shape),), {}))
    template = Template(module, lambda each: each)
    return prove(template, plan, 2, call, call.forms, grad_enabled=True)


@contextlib.contextmanager
def _processor(seed: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, each operation of a proof rounds otherwise, forward and backward."""
    seeds = iter(range(1000 * seed, 1000 * (seed + 1)))
    gradients = proof.gradients_of

    def tried_there(module: nn.Module, arguments: Any, adapting: Any = None) -> Any:
        drawn = [*module.parameters(), *Call(arguments).tensors]
        with Rounding(drawn, next(seeds)):
            return tried(module, arguments, adapting)

    def gradients_there(source: Any, results: Any, weights: Any) -> Any:
        with Rounding(weights, next(seeds)):
            return gradients(source, results, weights)

    with patch.context() as inside:
        inside.setattr(proof, "tried", tried_there)
        inside.setattr(trial_slices, "tried", tried_there)
        inside.setattr(proof, "gradients_of", gradients_there)
        yield


#: What reduces the channels of all ranks together.
SPANNING: dict[str, Function] = {
    "layer norm": lambda h: F.layer_norm(h, (INNER,), torch.arange(INNER) / 7, torch.ones(INNER)),
    "rms norm": lambda h: F.rms_norm(h, (INNER,), torch.arange(INNER) / 7),
    "layer norm of fewer": lambda h: F.layer_norm(h, h.shape[-1:], eps=1e-3),
    "its own norm": lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
    "less its mean": lambda h: h - h.mean(-1, keepdim=True),
    "beside its sum": lambda h: h + h.sum(dim=-1, keepdim=True) / 100,
}
RIGHT: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "feed forward": (Block, FEED_FORWARD),
    "gated": (Gated, Plan(("up", "gate"), ("down",))),
    "attention": (Attention, OF_HEADS),
    "attention with norms": (lambda: Attention(norm=True), OF_HEADS),
    "saturated": (lambda: Attention(scores_of=lambda each: each * 300), OF_HEADS),
    "fused": (Fused, OF_FUSED),
    "single precision within": (
        lambda: Block(lambda h: h.float().relu().to(h.dtype)),
        FEED_FORWARD,
    ),
    "buckets": (
        lambda: Block(last=lambda r: r * (torch.arange(WIDTH).float() / 3 * 3).long()),
        FEED_FORWARD,
    ),
    **{f"spanning: {k}": (lambda f=f: Block(f), FEED_FORWARD) for k, f in SPANNING.items()},
    "spanning: mean over heads": (
        lambda: Attention(scores_of=lambda s: s + s.mean(1, keepdim=True)),
        OF_HEADS,
    ),
    "its own zeros": (
        lambda: Block(last=lambda r: torch.zeros(r.shape).index_add(0, torch.arange(2), r)),
        FEED_FORWARD,
    ),
}


@pytest.mark.parametrize("seeds", PROCESSORS)
@pytest.mark.parametrize("name", RIGHT)
def test_right_splits_are_proven_on_each_processor(
    name: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, plan = RIGHT[name]
    for seed in seeds:
        with _processor(seed, monkeypatch):
            proof = _proven(make(), plan)
            assert proof.outputs == (SUM,)
            assert any(each.spans for each in proof.reductions) is name.startswith("spanning")


@pytest.mark.parametrize("num_vague", [0, 2, 3])
def test_other_numbers_are_tried_where_rounding_leaves_some_without_meaning(
    num_vague: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vague, seen = proof.Tolerance.is_vague, list[proof.Tolerance]()

    def is_vague(tolerance: proof.Tolerance, place: int) -> bool:
        if tolerance not in seen:
            seen.append(tolerance)
        return len(seen) <= num_vague or vague(tolerance, place)

    monkeypatch.setattr(proof.Tolerance, "is_vague", is_vague)
    told = pytest.raises(RefutedError, match="rounding alone")
    with told if num_vague == 3 else contextlib.nullcontext():
        assert _proven(Block(), FEED_FORWARD).outputs == (SUM,)


def _by_index(h: torch.Tensor) -> torch.Tensor:
    return h * torch.arange(h.shape[-1])


#: What is done between the maps that needs all channels, or depends on how many there are.
INNER_WRONG: dict[str, Function] = {
    "softmax": lambda h: h.softmax(-1),
    "log softmax": lambda h: h.log_softmax(-1),
    "a little softmax": lambda h: h + 1e-5 * h.softmax(-1),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "less the mean of all": lambda h: h - h.mean(),
    "by its largest": lambda h: h / h.abs().amax(-1, keepdim=True),
    "by its deviation": lambda h: h / h.std(),
    "cumulative": lambda h: h.cumsum(-1),
    "turned": lambda h: h.flip(-1) * torch.arange(h.shape[-1]),
    "rolled": lambda h: h.roll(1, -1),
    "sorted": lambda h: h.sort(-1).values,
    "largest few": lambda h: h * (h >= h.topk(3, -1).values[..., -1:]),
    "halves": lambda h: F.glu(h, -1).repeat(*[1] * (h.dim() - 1), 2),
    "neighbours": lambda h: F.avg_pool1d(h, 3, 1, 1),
    "by its number": lambda h: h * h.shape[-1],
    "by the root of it": lambda h: h / math.sqrt(h.shape[-1]),
    "by index": _by_index,
    "less its number": lambda h: h - 1 / h.shape[-1],
    "first ones": lambda h: h * (torch.arange(h.shape[-1]) < 10),
    "where it is the largest": lambda h: F.one_hot(h.argmax(-1), h.shape[-1]) * h,
    "grouped norm": lambda h: F.group_norm(h.transpose(1, 2), 2).transpose(1, 2),
    "with its norm": lambda h: h + h.norm(dim=-1, keepdim=True),
    "normal in single precision": lambda h: F.normalize(h.float(), dim=-1).to(h.dtype),
}
ATTENTION_WRONG: dict[str, Function] = {
    "by the number of heads": lambda s: s / s.shape[1],
    "slopes by head": lambda s: s * torch.arange(s.shape[1])[:, None, None],
    "softmax over heads": lambda s: s * s.softmax(1),
    "talking heads": lambda s: s.cumsum(1),
}
WRONG: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    **{f"inner: {k}": (lambda f=f: Block(f), FEED_FORWARD) for k, f in INNER_WRONG.items()},
    **{
        f"attention: {name}": (lambda f=f: Attention(scores_of=f), OF_HEADS)
        for name, f in ATTENTION_WRONG.items()
    },
    "a forgotten sum": (Block, Plan(columns=("up", "down"))),
    "a sum too many": (lambda: Block(last=torch.tanh), FEED_FORWARD),
    "a norm behind it": (lambda: Block(last=lambda r: F.normalize(r, dim=-1)), FEED_FORWARD),
    "heads that were not divided": (Attention, Plan(**MAPS)),
    "another order of heads": (Fused, Plan(("all",), ("out",), divided=(("", "num_heads"),))),
    "a map that is left whole": (
        Attention,
        Plan(("query", "key"), ("out",), divided=(("", "num_heads"),)),
    ),
}


@pytest.mark.parametrize("seeds", PROCESSORS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_splits_are_refused_on_each_processor(
    name: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, plan = WRONG[name]
    for seed in seeds:
        with _processor(seed, monkeypatch), pytest.raises(RefutedError):
            _proven(make(), plan)


def test_what_every_rank_has_alike_is_told_from_a_sum() -> None:
    class Pair(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x * 2

    assert _proven(Pair(), FEED_FORWARD).outputs == (SUM, SAME)


#: Where a module keeps something of its call.
KEEPERS: dict[str, Callable[[Any, Any], object]] = {
    "attribute": lambda block, kept: setattr(block, "kept", kept),
    "list": lambda block, kept: setattr(block, "kept", [1, kept]),
    "nested": lambda block, kept: setattr(block, "kept", {"of": [(kept,)]}),
    "inner module": lambda block, kept: setattr(block.down, "kept", kept),
}
#: What, of the input and of what lies between the maps; whether a rank has all of it.
KEPT: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "inner": (lambda x, h: h, False),
    "inner, detached": (lambda x, h: h.detach(), False),
    "norm of inner": (lambda x, h: h.detach().norm(), False),
    "with a graph": (lambda x, h: x * 2, False),
    "input": (lambda x, h: x.detach() * 2, True),
    "shape": (lambda x, h: tuple(x.shape), True),
}


class Keeping(Block):
    """Keeps something."""

    def __init__(self, keeper: str, kept: str) -> None:
        super().__init__()
        self.keeper, self.chosen = keeper, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.up(x))
        KEEPERS[self.keeper](self, KEPT[self.chosen][0](x, hidden))
        return self.down(hidden)


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("kept", KEPT)
def test_modules_that_keep_what_is_of_a_slice_stay_whole(keeper: str, kept: str) -> None:
    if KEPT[kept][1]:
        assert _proven(Keeping(keeper, kept), FEED_FORWARD).outputs == (SUM,)
        return
    with pytest.raises(RefutedError, match=r"it keeps an activation, .*kept.*, of which a rank"):
        _proven(Keeping(keeper, kept), FEED_FORWARD)


def test_what_is_nothing_but_rounding_proves_nothing() -> None:
    def cancelled(h: torch.Tensor) -> torch.Tensor:
        return (h + 1e16) - 1e16 - h

    with pytest.raises(RefutedError, match="rounding alone"):
        _proven(Block(cancelled), FEED_FORWARD)


def test_long_sequences_are_shortened_where_widths_are_as_long() -> None:
    def noted(h: torch.Tensor) -> torch.Tensor:
        assert h.shape[1] == 6  # else the trial fails
        return h.relu()

    class Wide(Block):
        def __init__(self) -> None:
            super().__init__(noted)
            self.up, self.down = nn.Linear(64, INNER), nn.Linear(INNER, 64)

    assert _proven(Wide(), FEED_FORWARD, (4, 64, 64)).outputs == (SUM,)


def test_a_result_for_each_example_is_refused() -> None:
    """More examples give more tensors, of which nobody has seen how they are split."""

    class Listed(Block):
        def forward(self, x: Any) -> Any:
            return [super(Listed, self).forward(each) for each in x]

    with pytest.raises(RefutedError, match="returns more tensors or fewer"):
        _proven(Listed(), FEED_FORWARD, (2, 6, WIDTH))


def test_attention_of_no_heads_is_refused_before_it_ends_the_process() -> None:
    class NoKeys(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            none = states[:, :0]
            return nn.functional.scaled_dot_product_attention(states, none, none, enable_gqa=True)

    with pytest.raises(RefutedError, match="empty query, key or value"):
        tried(NoKeys(), ((torch.ones(2, 4, 6, 8),), {}))


class Two(nn.Module):
    """Two inner layers in one module, of which the second reads what the first has summed."""

    def __init__(self, is_post: bool, between: Function = F.gelu) -> None:
        super().__init__()
        for name in ("up", "widen"):
            setattr(self, name, nn.Linear(WIDTH, INNER))
        for name in ("down", "narrow"):
            setattr(self, name, nn.Linear(INNER, WIDTH))
        self.is_post, self.between = is_post, between
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_post:
            x = self.between(self.first(x + self.down(F.gelu(self.up(x)))))
            return self.second(x + self.narrow(F.gelu(self.widen(x))))
        x = self.between(x + self.down(F.gelu(self.up(self.first(x)))))
        return x + self.narrow(F.gelu(self.widen(self.second(x))))


def _plan_of_two(sums: tuple[str, ...], *, is_mean: bool) -> Plan:
    return Plan(("up", "widen"), ("down", "narrow"), sums=sums, is_mean=is_mean)


@pytest.mark.parametrize(
    ("is_post", "sums", "is_mean", "output"),
    [
        (False, ("down",), True, MEAN),
        (False, ("down", "narrow"), False, COMMON),
        (True, ("down", "narrow"), False, COMMON),
        (False, (), False, None),
        (False, (), True, None),
        (False, ("down",), False, None),
        (True, ("down",), True, None),
        (True, ("narrow",), True, None),
    ],
)
def test_what_code_goes_on_with_is_summed_before(
    is_post: bool, sums: tuple[str, ...], is_mean: bool, output: str | None
) -> None:
    plan = _plan_of_two(sums, is_mean=is_mean)
    if output is None:
        with pytest.raises(RefutedError, match="differs from what it gives whole"):
            _proven(Two(is_post), plan)
    else:
        assert _proven(Two(is_post), plan).outputs == (output,)


def test_gradients_that_code_changes_behind_a_sum_are_noticed() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.register_hook(lambda gradient: F.normalize(gradient, dim=-1))
        return x

    with pytest.raises(RefutedError, match="changes gradients"):
        _proven(Two(is_post=False, between=hooked), _plan_of_two(("down",), is_mean=True))


class Clipped(torch.autograd.Function):
    """Passes its gradient on with a norm of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return F.normalize(gradient, dim=-1)


class Scaled(Two):
    """Whose scale gets a gradient that is no sum of those of its slices."""

    def __init__(self, function: Function) -> None:
        super().__init__(is_post=False)
        self.scale, self.function = nn.Parameter(torch.rand(WIDTH)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.function(self.scale)


def test_gradients_of_parameters_that_every_rank_has_are_compared() -> None:
    plan = _plan_of_two(("down", "narrow"), is_mean=False)
    assert _proven(Scaled(torch.tanh), plan).outputs == (COMMON,)
    with pytest.raises(RefutedError, match="changes gradients"):
        _proven(Scaled(Clipped.apply), plan)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_module_checkpoints_is_tried_once(reentrant: bool) -> None:
    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    assert _proven(Checkpointed(), FEED_FORWARD) == _proven(Block(), FEED_FORWARD)


def test_what_code_draws_from_python_is_refused() -> None:
    def drawing(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if random.random() < 2 else x

    before = random.getstate()
    with pytest.raises(RefutedError, match="in another way than by dropout"):
        _proven(Block(last=drawing), FEED_FORWARD)
    assert random.getstate() == before


class Tabled(Block):
    """Keeps a table for all blocks of its class."""

    tables: ClassVar[dict[int, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
        return super().forward(x) * self.tables[x.shape[1]]


def test_what_a_class_keeps_of_a_trial_is_put_back() -> None:
    assert _proven(Tabled(), FEED_FORWARD).outputs == (SUM,)
    assert not Tabled.tables  # they would be in double precision
