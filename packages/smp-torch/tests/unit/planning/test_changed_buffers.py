"""Where a graph reads and keeps a buffer of a split module, and which microbatches may overlap."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.changed_buffers import (
    buffers_apart,
    buffers_in_turn,
    title_of,
)
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.segments import Plan, cut
from smdistributed.modelparallel.torch.record.buffers_before import Earlier, buffer_before
from smdistributed.modelparallel.torch.record.trace.buffers import KeptBuffer, keep_on

WIDTH = 4


class Net(nn.Module):
    def __init__(self, early: Callable[..., Any], late: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.early, self.late = leave, early, late
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.early(self, self.first(self.before(self, x)))
        return self.late(self, self.second(x))


def leave(net: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def average(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.kept = 0.9 * net.kept + 0.1 * x.detach().mean(0)
    return x - net.kept


def count(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.kept += 1
    return x * net.kept


def read(net: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (net.kept + 1)


def grow(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.kept = x.detach()
    return x


def learn(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.kept = x.mean(0)
    return x


def plan_of(early: Callable[..., Any], late: Callable[..., Any], net: Any = None) -> Plan:
    recorded = Recorded(net or Net(early, late), {"first": 0, "second": 1})
    if net is not None:
        net.early, net.late = early, late

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = recorded.module(x).square().mean()
        recorded.backward(loss)
        return loss

    return recorded.plan(body, torch.randn(2, WIDTH))


def kept_at(plan: Plan) -> list[int]:
    return [node.rank for node in plan.graph.nodes if isinstance(node.target, KeptBuffer)]


@pytest.mark.parametrize(
    ("early", "late", "rank"),
    [(average, leave, 0), (leave, average, 1), (count, leave, 0), (leave, count, 1)],
)
def test_a_buffer_is_kept_where_its_last_value_is_made(early: Any, late: Any, rank: int) -> None:
    plan = plan_of(early, late)
    assert kept_at(plan) == [rank]
    assert buffers_in_turn([plan, plan]) == []
    ((_, changed),) = plan.graph.buffers.items()
    # What comes of activations nobody knows before the step runs.
    assert (changed.known is None) == (average in (early, late))
    assert changed.value in plan.graph.returned


def test_microbatches_follow_each_other_where_a_buffer_is_read_and_changed_apart() -> None:
    net = Net(leave, average)
    net.before = read
    (reason,) = buffers_in_turn([plan_of(leave, average, net)])
    assert "Net.kept is read in one place of the pipeline and changed in another" in reason


def test_microbatches_that_read_a_buffer_where_others_do_not_change_it_are_refused() -> None:
    net = Net(leave, leave)
    changing, reading = plan_of(leave, average, net), plan_of(read, leave, net)
    with pytest.raises(UnsupportedError, match="changed by some microbatches of a step"):
        buffers_in_turn([changing, reading])
    assert buffers_in_turn([reading, reading]) == []


@pytest.mark.parametrize("reading", [(read, leave), (leave, read), (read, read), (average, leave)])
def test_microbatches_that_leave_a_buffer_read_it_where_others_change_it(reading: Any) -> None:
    net = Net(leave, leave)
    changing, other = plan_of(leave, average, net), plan_of(*reading, net)
    ((slot, rank),) = buffers_apart([changing, other]).items() or [((net, "kept"), 1)]
    assert rank in kept_at(changing) + kept_at(other)
    partition_of: dict[nn.Module, int] = {net.first: 0, net.second: 1}
    for plan in (changing, other):
        keep_on(plan.graph, slot, title_of(slot), rank)
    plans = [
        cut(plan.graph, partition_of, lambda slot: partition_of[slot[0]], ComputeCosts())
        for plan in (changing, other)
    ]
    assert [kept_at(plan) for plan in plans] == [[rank], [rank]]
    assert buffers_apart(plans) == {}
    (reason,) = buffers_in_turn(plans)
    assert reason.startswith("Net.kept is read in one place")
    # What comes of it is computed there, too, and nowhere else.
    assert not any(
        node.replicated and not all(value.replicated for value in node.inputs)
        for plan in plans
        for node in plan.graph.nodes
    )


def test_what_a_microbatch_leaves_as_it_is_is_known_from_those_before() -> None:
    net = Net(leave, leave)
    plan = plan_of(read, leave, net)
    keep_on(plan.graph, (net, "kept"), "Net.kept", 1)
    earlier: Any = types.SimpleNamespace(graph=plan.graph, constants_read=list)
    content = torch.arange(4)
    found = buffer_before([Earlier(earlier, ((), {}))], lambda *_: content, net, "kept")
    assert found is content


@pytest.mark.parametrize(
    ("change", "reason"), [(grow, r"shape \(2, 4\)"), (learn, "requires a gradient")]
)
def test_a_buffer_keeps_its_form_and_has_no_gradient(change: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"kept, a buffer of a module.*{reason}"):
        plan_of(change, leave)


def test_a_checkpointed_call_changes_no_buffer() -> None:
    def again(net: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(count, net, x, use_reentrant=False)
        return found

    with pytest.raises(UnsupportedError, match="in a checkpointed call"):
        plan_of(again, leave)
