"""Segments are tried on fakes: which values are pieces where they cross, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.collectives.shapes import ShapesOfFakes
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import Layout
from smdistributed.modelparallel.torch.context_parallel.proving import Proofs
from smdistributed.modelparallel.torch.context_parallel.run import Ways
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.execute.split_programs import (
    SplitPlan,
    SplitProgram,
    split_plan,
)

BATCH, LENGTH, WIDTH = 2, 8, 4
TOKENS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)


class _NobodyElse:
    """Two ranks, of which nothing is asked."""

    size, rank = 2, 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).unsqueeze(1)
        return functional.scaled_dot_product_attention(h, h, h, is_causal=True).squeeze(1)


class Net(nn.Module):
    """An embedding and a block on the first partition, a block on the second one."""

    def __init__(self, block: nn.Module, between: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BATCH * LENGTH, WIDTH)
        self.first = block
        self.last = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(self.embedding(tokens))))


def split(net: Net, step: Callable[[Any, Any], Any] | None = None) -> tuple[Any, SplitPlan]:
    """Returns the plan of a step, and how it is computed with pieces."""
    recorded = Recorded(net, {"embedding": 0, "first": 0, "last": 1})

    def train(tokens: torch.Tensor) -> Any:
        loss = net(tokens).square().mean()
        recorded.backward(loss)
        return loss

    plan = recorded.plan(train if step is None else lambda tokens: step(net, tokens), TOKENS)
    proofs = Proofs(ContextGroup(ShapesOfFakes(_NobodyElse())))  # type: ignore[arg-type]
    ways = [Ways(proofs) for _ in plan.segments]
    found = SplitPlan(proofs, LENGTH, (Layout(1),), ways)
    random = recorded.random
    with recorded.mode:
        tokens = torch.empty_like(TOKENS)

    def make(segment: Any) -> SplitProgram:
        def program(check: Any) -> Program:
            return Program(plan, segment, CPU, random, check=check)

        return SplitProgram(program, segment, found, recorded.mode, random.apart)

    with recorded.fakes.in_place():
        split_plan(plan, found, [tokens], make)
    return plan, found


def test_a_value_crosses_as_a_piece_and_is_returned_whole() -> None:
    plan, found = split(Net(Attention()), lambda net, tokens: net(tokens))
    (crossing,) = plan.segments[1].inputs
    assert crossing.shape == (BATCH, LENGTH, WIDTH)
    assert found.held[crossing].layout == Layout(1)
    travelling = found.travelling(crossing)
    assert travelling.shape == (BATCH, LENGTH // 2, WIDTH)
    assert travelling.wire_buffer(CPU).shape == travelling.shape
    assert travelling.num_bytes * 2 == crossing.num_bytes
    (returned,) = plan.graph.returned
    assert found.held[returned].is_piece


def test_a_sum_over_the_sequence_crosses_whole() -> None:
    plan, found = split(Net(nn.Linear(WIDTH, WIDTH), lambda x: x.mean(1)))
    (crossing,) = plan.segments[1].inputs
    assert not found.held[crossing].is_piece
    assert found.travelling(crossing) is crossing


def test_numbers_of_wholes_that_python_has_given_are_those_of_pieces() -> None:
    def flattened(x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        return functional.gelu(x.reshape(batch * length, width)).view(batch, length, width)

    plan, found = split(Net(nn.Linear(WIDTH, WIDTH), flattened))
    assert found.held[plan.segments[1].inputs[0]].is_piece


class Kept(nn.Module):
    """Adds what it was given in the call before, which its first call has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        result = out if self.last is None else out + self.last
        self.last = out.detach()
        return result


@pytest.mark.parametrize(
    ("block", "between", "told"),
    [
        (
            nn.Linear(WIDTH, WIDTH),
            lambda x: x.cumsum(1),
            "It is torch.Tensor.cumsum, in the model's own",
        ),
        (nn.GRU(WIDTH, WIDTH, batch_first=True), lambda x: x[0], "in a GRU"),
        (Kept(), lambda x: x, "that an earlier microbatch has left"),
    ],
    ids=["between", "inside", "kept"],
)
def test_what_reads_across_the_sequence_is_refused(block: Any, between: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        split(Net(block, between))


def test_a_step_without_pieces_is_refused() -> None:
    net = Net(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(UnsupportedError, match="computes nothing of which"):
        split(net, lambda net, tokens: tokens * 2.0)


def test_nothing_is_left_behind() -> None:
    net = Net(Attention())
    calls: list[int] = []
    net.first.register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    split(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
