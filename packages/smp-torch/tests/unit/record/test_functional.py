"""Modules that are called with other parameters than their own: their code is between modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn
from torch.func import functional_call

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.ir import NodeKind

WIDTH = 4


def plan_of(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Plan:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    recorded = Recorded(net, {"0": 0, "2": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = call(net, x).square().mean()
        recorded.backward(loss)
        return loss

    return recorded.plan(body, torch.randn(2, WIDTH))


def called(plan: Plan) -> list[tuple[str, int]]:
    """The calls of a plan, and where they are made."""
    calls = (NodeKind.LEAF, NodeKind.CALL)
    return [(node.name, node.rank) for node in plan.graph.nodes if node.kind in calls]


def test_own_parameters_are_those_of_the_module() -> None:
    plan = plan_of(lambda net, x: functional_call(net, dict(net.named_parameters()), (x,)))
    assert called(plan)[:3] == [("0", 0), ("1", 1), ("2", 1)]


def test_with_others_its_functions_are_called_between_modules() -> None:
    def call(net: Any, x: torch.Tensor) -> torch.Tensor:
        fast = {name: 2 * each for name, each in net.named_parameters()}
        return net(x) + functional_call(net, fast, (x,))

    names = called(plan_of(call))
    linear = [rank for name, rank in names if name == "torch.nn.functional.linear"]
    assert len(linear) == 2
    # The module itself, with its own, is there once.
    assert [name for name, _ in names if name in ("0", "2")] == ["0", "2"]


def test_one_that_is_left_with_others_is_refused() -> None:
    def call(net: Any, x: torch.Tensor) -> torch.Tensor:
        net[2]._parameters["weight"] = 2 * net[2].weight
        return net(x)

    with pytest.raises(UnsupportedError, match="2 is left with other parameters"):
        plan_of(call)


def test_functions_of_a_layer_are_called_where_their_parameters_are() -> None:
    def call(net: Any, x: torch.Tensor) -> torch.Tensor:
        halves = {"weight": net[0].weight / 2, "bias": net[0].bias / 2}
        return net(x) + functional_call(net[0], halves, (x,))

    names = called(plan_of(call))
    assert [rank for name, rank in names if name == "torch.nn.functional.linear"] == [0]
