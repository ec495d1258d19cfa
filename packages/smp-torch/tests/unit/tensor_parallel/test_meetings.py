"""Slices that meet what every rank has whole get their own part of it, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensor_parallel.auto.attempts import plans_of
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.meetings import Cut, Meeting, Meetings
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan
from smdistributed.modelparallel.torch.tensor_parallel.auto.proof import prove
from smdistributed.modelparallel.torch.tensor_parallel.auto.proven import Proof
from smdistributed.modelparallel.torch.tensor_parallel.auto.statistics import Reduction, Statistics
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template

WIDTH, HEADS, LENGTH = 16, 4, 6
Scores = Callable[["Attention", torch.Tensor, Any], torch.Tensor]


class Attention(nn.Module):
    """Attention that does something with its scores, of which each head has its own."""

    def __init__(self, scores_of: Scores) -> None:
        super().__init__()
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.slopes = nn.Parameter(torch.rand(HEADS, 1, 1))
        self.table = nn.Embedding(7, HEADS)
        self.mix = nn.Parameter(torch.rand(HEADS, HEADS))
        self.register_buffer("kept", torch.rand(HEADS))
        self.scores_of = scores_of

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # Sizes are numbers, which no attribute has.
        query, key, value = (
            each(x).view(x.shape[0], x.shape[1], 4, 4).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        made = self.scores_of(self, query @ key.mT, bias).softmax(-1) @ value
        return self.out(made.transpose(1, 2).reshape(x.shape[0], x.shape[1], 16))


def _of_table(module: Attention, scores: torch.Tensor, bias: Any) -> torch.Tensor:
    distances = torch.arange(scores.shape[-1])[:, None] - torch.arange(scores.shape[-1])
    return scores + module.table(distances.clamp(-3, 3) + 3).permute(2, 0, 1)[None]


def _folded(module: Attention, scores: torch.Tensor, bias: Any) -> torch.Tensor:
    together = bias.expand(scores.shape[0], HEADS, 1, scores.shape[-1]).flatten(0, 1)
    return (scores.flatten(0, 1) + together).view(scores.shape)


def _with_sinks(module: Attention, scores: torch.Tensor, bias: Any) -> torch.Tensor:
    sinks = module.slopes[None].expand(scores.shape[0], -1, scores.shape[-2], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


RIGHT: dict[str, Scores] = {
    "sizes alone": lambda module, scores, bias: scores,
    "slopes": lambda module, scores, bias: scores * module.slopes,
    "in place": lambda module, scores, bias: scores.add_(module.slopes),
    "a buffer": lambda module, scores, bias: scores / module.kept.view(1, -1, 1, 1),
    "an argument": lambda module, scores, bias: scores + bias,
    "folded with examples": _folded,
    "a table": _of_table,
    "letters": lambda module, scores, bias: torch.einsum("bhij,h->bhij", scores, module.kept),
    "more keys": _with_sinks,
    "a choice": lambda module, scores, bias: torch.where(bias > 0, scores, scores * 0.5),
    "a written size": lambda module, scores, bias: scores * scores.new_ones(1, HEADS, 1, 1),
}
#: What needs the scores of all heads.
WRONG: dict[str, Scores] = {
    "a mix": lambda module, scores, bias: torch.einsum("bhij,hk->bkij", scores, module.mix),
    "turned": lambda module, scores, bias: scores.flip(1) * module.slopes,
    "all heads": lambda module, scores, bias: scores.softmax(1) * module.slopes,
    "their largest": lambda module, scores, bias: scores - scores.amax(1, keepdim=True),
    "other heads": lambda module, scores, bias: (
        scores * module.slopes.roll(scores.shape[1] % HEADS, 0)
    ),
}
PLAN = Plan(("query", "key", "value"), ("out",))


def _call() -> Call:
    return Call(((torch.empty(2, LENGTH, WIDTH), torch.empty(1, HEADS, 1, LENGTH)), {}))


def _proven(module: nn.Module, plan: Plan = PLAN, call: Call | None = None) -> Proof:
    call = call or _call()
    template = Template(module, lambda each: each)
    return prove(template, plan, 2, call, call.forms, grad_enabled=True)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_whole_is_cut_where_slices_meet_it(name: str) -> None:
    proof = _proven(Attention(RIGHT[name]))
    sizes = [each for each in proof.meetings if each.cuts[0].place < 0]
    assert {each.function for each in sizes} >= {"view", "reshape"}
    assert (len(proof.meetings) > len(sizes)) is (name != "sizes alone")


@pytest.mark.parametrize("name", WRONG)
def test_what_needs_all_heads_is_refused(name: str) -> None:
    with pytest.raises(RefutedError):
        _proven(Attention(WRONG[name]))


def test_meetings_that_are_known_are_all_that_may_be_met() -> None:
    scores, slopes = torch.rand(2, 2, 3, 3), torch.arange(4.0).view(4, 1, 1)
    found = Meetings(2, 1, 2)
    made, _ = found.met(torch.add, (scores, slopes), {})
    torch.testing.assert_close(made[1], slopes[2:])
    assert found.found == [Meeting("add", (Cut(1, -3, 4),))]
    known = Meetings(2, 0, 2, tuple(found.found))
    torch.testing.assert_close(known.met(torch.add, (scores, slopes), {})[0][1], slopes[:2])
    again = Meetings(2, 0, 2, tuple(found.found))
    with pytest.raises(SMPError, match=r"in another way than when they were proven \(mul\)"):
        again.met(torch.mul, (scores, slopes), {})
    # As often as code likes, as in a loop.
    torch.testing.assert_close(known.met(torch.add, (scores, slopes), {})[0][1], slopes[:2])
    with pytest.raises(SMPError, match="in another way"):
        known.met(torch.add, (slopes, scores), {})
    with pytest.raises(SMPError, match="in another way"):  # other heads than there were
        known.met(torch.add, (torch.rand(2, 3, 3, 3), torch.rand(6, 1, 1)), {})


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.add, [(2, 2, 3), (2, 2, 3)]),
        (torch.add, [(2, 3, 3), (1, 3, 3)]),
        (torch.add, [(2, 2, 3), (8, 2, 3)]),
        (torch.Tensor.add_, [(4, 2), (2, 2)]),
        (torch.matmul, [(2, 4), (2, 4)]),
    ],
)
def test_other_calls_are_left_as_they_are(function: Any, shapes: Any) -> None:
    given = [torch.zeros(shape) for shape in shapes]
    meetings = Meetings(2, 0, 2)
    assert meetings.met(function, given, {})[0] is given
    assert not meetings.found


@pytest.mark.parametrize(
    ("shape", "sizes", "own"),
    [
        ((2, 6, 8), (2, 6, 4, 4), (2, 6, 2, 4)),
        ((2, 6, 24), (2, 6, 3, 4, 4), (2, 6, 3, 2, 4)),
        ((2, 6, 16), (2, 6, 2, 4, 4), (2, 6, 2, 2, 4)),
        ((2, 6, 2, 4), (2, 6, 16), (2, 6, 8)),
        ((2, 6, 2, 4), (12, 16), (12, 8)),
        ((4, 6, 6), (2, 4, 6, 6), (2, 2, 6, 6)),
        ((6, 2, 8), (6, 8, 4), (6, 4, 4)),
        ((2, 2, 6, 4), (8, 6, 4), (4, 6, 4)),
        ((2, 6, 4), (2, 6, 4, 2), (2, 6, 2, 2)),
    ],
)
def test_of_sizes_the_one_that_counts_heads_is_cut(shape: Any, sizes: Any, own: Any) -> None:
    x = torch.zeros(shape)
    for args in ((x, *sizes), (x, sizes)):
        made, _ = Meetings(2, 0, 2).met(torch.Tensor.view, args, {})
        assert tuple(made[0].view(*made[1:]).shape) == own


class FewKeys(nn.Module):
    """Attention whose queries share one head of keys, or few."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.query, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, 4 * number), nn.Linear(WIDTH, 4 * number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            each(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        heads[1:] = [each.repeat_interleave(8 // self.number, 1) for each in heads[1:]]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Attention whose maps of heads read what small maps make."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Linear(WIDTH, 6), nn.LayerNorm(6)
        self.query, self.out = nn.Linear(6, 32), nn.Linear(32, WIDTH)
        self.both = nn.Linear(6, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.norm(self.down(x))
        query = self.query(small).unflatten(-1, (8, 4)).transpose(1, 2)
        key, value = self.both(small).unflatten(-1, (8, 8)).transpose(1, 2).chunk(2, -1)
        return self.out(
            F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize(
    ("make", "size", "columns"),
    [
        (lambda: FewKeys(2), 2, ("query", "key", "value")),
        (lambda: FewKeys(1), 2, ("query",)),
        (lambda: FewKeys(2), 4, ("query",)),
        (Latent, 2, ("query", "both")),
    ],
)
def test_small_maps_stay_whole_where_heads_cannot_be_shared(
    make: Callable[[], nn.Module], size: int, columns: tuple[str, ...]
) -> None:
    call = Call(((torch.empty(2, LENGTH, WIDTH),), {}))
    template = Template(make(), lambda each: each)
    proven = {}
    for plan in plans_of(template, call, size, closes=True, goes_on=True):
        try:
            prove(template, plan, size, call, call.forms, grad_enabled=True)
        except RefutedError:
            continue
        proven.setdefault(plan.columns, plan.sums)
    assert columns == min(proven, key=lambda each: len(proven[each]))


def test_reductions_that_are_known_are_all_that_there_may_be() -> None:
    known = (Reduction("mean", 6), Reduction("mean", 2, spans=True))
    x = torch.rand(3, 6, 2)
    statistics = Statistics(2, 0, lambda share: 2 * share, known=known)
    assert statistics.spanning(torch.mean, (x, 1), {}) is None
    spanning = statistics.spanning(torch.mean, (x, -1), {"keepdim": True})
    assert spanning is not None
    torch.testing.assert_close(spanning(x, -1, keepdim=True), x.mean(-1, keepdim=True))
    with pytest.raises(SMPError, match=r"in another way.*mean of 2 numbers"):
        statistics.spanning(torch.mean, (x, -1), {})
    again = Statistics(2, 0, lambda share: share, known=known)
    with pytest.raises(SMPError, match="sum of 6 numbers"):
        again.spanning(torch.sum, (x, 1), {})


class OneMap(nn.Module):
    """Queries, keys and values of one head for all, and an inner layer, of one map."""

    def __init__(self, inner: int = 0) -> None:
        super().__init__()
        self.num_heads, self.inner_size, self.split_size = HEADS, inner, WIDTH
        self.all = nn.Linear(WIDTH, WIDTH + 2 * 4 + inner)
        self.out = nn.Linear(WIDTH, WIDTH)
        if inner:
            self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value, *inner = self.all(x).split(
            [self.split_size, 4, 4, *[self.inner_size] * (self.inner_size > 0)], -1
        )
        query = query.unflatten(-1, (-1, 4)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(query, key[:, None], value[:, None])
        made = self.out(seen.transpose(1, 2).flatten(2))
        return made + self.down(F.gelu(inner[0])) if inner else made


@pytest.mark.parametrize("inner", [0, 24])
def test_of_one_map_what_can_be_shared_is_split(inner: int) -> None:
    call = Call(((torch.empty(2, LENGTH, WIDTH),), {}))
    template = Template(OneMap(inner), lambda each: each)
    proven = []
    for plan in plans_of(template, call, 2, closes=True, goes_on=True):
        try:
            prove(template, plan, 2, call, call.forms, grad_enabled=True)
        except RefutedError:
            continue
        proven.append(plan)
    (sections,) = {dict(plan.partly)["all"] for plan in proven}
    assert [each.is_split for each in sections] == [True, False, False, *[True] * bool(inner)][
        : len(sections)
    ]
