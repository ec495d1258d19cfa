"""Where a graph writes to parameters, what comes over for it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.changed_parameters import written_in_place
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.data import put_data
from smdistributed.modelparallel.torch.record.ir import NodeKind

WIDTH = 4


class Net(nn.Module):
    """Layers on partitions 0 and 1, with averages of each other's weights."""

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.early = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.late = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        found = self.act(self, x)
        x = x + self.early(x)
        x = x + self.late(self.second(x))
        return x if found is None else x * found


def plan_of(act: Callable[..., Any], call: Callable[..., Any] | None = None) -> Plan:
    recorded = Recorded(Net(act), {"first": 0, "early": 0, "second": 1, "late": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        out = recorded.module(x) if call is None else call(recorded.module, x)
        loss: torch.Tensor = out.square().mean()
        recorded.backward(loss)
        return loss

    return recorded.plan(body, torch.randn(2, WIDTH))


def by_method(k: torch.Tensor, q: torch.Tensor) -> None:
    with torch.no_grad():
        k.mul_(0.9).add_(q, alpha=0.1)


def by_data(k: torch.Tensor, q: torch.Tensor) -> None:
    k.data.mul_(0.9).add_(q.data, alpha=0.1)


def by_new_data(k: torch.Tensor, q: torch.Tensor) -> None:
    k.data = k.data * 0.9 + q.data * 0.1


def by_list(k: torch.Tensor, q: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([k], [q], 0.1)


@pytest.mark.parametrize("average", [by_method, by_data, by_new_data, by_list])
@pytest.mark.parametrize("target", ["early", "late"])
def test_an_average_is_made_where_the_parameter_is(average: Any, target: str) -> None:
    source = "second" if target == "early" else "first"

    def act(net: Any, x: torch.Tensor) -> None:
        average(net.get_submodule(target).weight, net.get_submodule(source).weight)

    plan = plan_of(act)
    rank = int(target == "late")
    writes = [node for node in plan.graph.nodes if written_in_place(plan.graph, node)]
    assert {node.rank for node in writes} == {rank}
    # The other partition's weight comes over once, before all that is called.
    calls = [node for node in plan.graph.nodes if node.kind is NodeKind.CALL and node not in writes]
    assert {node.rank for node in calls if not node.grad_enabled} <= {rank}
    (given,) = [
        node
        for node in plan.graph.nodes
        if node.kind is NodeKind.ATTRIBUTE and node.name == f"{source}.weight"
    ]
    assert (given.rank, given.segment) == (1 - rank, 0)
    assert len(plan.segments) == (3 if target == "early" else 4)
    assert plan.in_turn == ["code between modules writes to Linear.weight"]


def test_parameters_of_two_partitions_are_written_one_by_one() -> None:
    def act(net: Any, x: torch.Tensor) -> None:
        with torch.no_grad():
            torch._foreach_mul_([net.early.weight, net.late.weight], 0.5)

    plan = plan_of(act)
    assert [node.rank for node in plan.graph.nodes if written_in_place(plan.graph, node)] == [0, 1]


def assigned_of_others(net: Any, x: torch.Tensor) -> None:
    net.early.weight.data = net.first.weight.data


def assigned_and_read(net: Any, x: torch.Tensor) -> torch.Tensor:
    former = net.early.weight.data
    net.early.weight.data = former * 0.5
    return former.sum()


def assigned_and_written(net: Any, x: torch.Tensor) -> None:
    new = net.early.weight.data * 0.5
    net.early.weight.data = new
    new.add_(1)


def assigned_behind_its_use(net: Any, x: torch.Tensor) -> None:
    net.first.weight.data = net.first.weight.data * 0.5


def assigned_frozen_behind_its_use(net: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = net.early(x)
    net.early.weight.data = net.early.weight.data * 0.5
    return out


def assigned_a_result(net: Any, x: torch.Tensor) -> None:
    net.early.bias.data = net.second(x)[0].detach()


def read_elsewhere(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.early.weight.data.mul_(0.5)
    return (net.second(x).detach()[0] * net.early.weight).sum()


def shown_elsewhere(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.early.weight.data.mul_(0.5)
    return nn.functional.linear(x, net.late.weight * net.early.weight.data)


def of_both(net: Any, x: torch.Tensor) -> None:
    net.early.weight.data.copy_(net.late.weight)
    net.late.weight.data.mul_(0.5)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (assigned_of_others, "in memory of their own"),
        (assigned_and_read, "reads what shares memory"),
        (assigned_and_written, "reads what shares memory"),
        (assigned_behind_its_use, "behind what has a gradient by it"),
        (assigned_frozen_behind_its_use, "behind what has a gradient by it"),
        (assigned_a_result, "a tensor that others have too"),
        (shown_elsewhere, "combines the parameters"),
        (of_both, "reads, on another partition, Linear.weight"),
    ],
)
def test_what_one_process_would_show_to_others_is_refused(act: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        plan_of(act)


def test_a_written_parameter_draws_what_reads_it_to_its_rank() -> None:
    plan = plan_of(read_elsewhere)
    (product,) = [node for node in plan.graph.nodes if node.name == "torch.Tensor.mul"][:1]
    assert product.rank == 0


def test_a_checkpointed_call_that_is_split_writes_to_no_parameter() -> None:
    def act(net: Any, x: torch.Tensor) -> None:
        net.early.weight.data.mul_(0.5)

    with pytest.raises(UnsupportedError, match="in a checkpointed call"):
        plan_of(act, lambda net, x: checkpoint(net, x, use_reentrant=False))

    def later(net: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(net, x, use_reentrant=False)
        net.early.weight.data.mul_(0.5)
        return out

    with pytest.raises(UnsupportedError, match="is computed again, for a checkpointed call"):
        plan_of(lambda net, x: None, later)


def test_numbers_are_put_into_the_memory_that_is_there() -> None:
    parameter, data = nn.Parameter(torch.zeros(2)), torch.ones(2)
    memory, version = parameter.data_ptr(), parameter._version
    put_data(parameter, data)
    assert (parameter.data_ptr(), parameter._version) == (memory, version)
    assert torch.equal(parameter, data)
