"""Parameters that a step has require no gradient for some calls, such as those of a critic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.ir import NodeKind

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(x))
        return found


def recorded(body: Callable[[Net, torch.Tensor], Any]) -> list[tuple[str, int, bool]]:
    """Returns the calls of a step: names, how much is frozen, whether a gradient is required."""
    net = Net()
    found = Recorded(net, {"one": 0, "two": 1})
    found.place(net, torch.ones(2, WIDTH))
    way = found.way(lambda x: body(net, x), torch.ones(2, WIDTH))
    return [
        (node.name, len(node.frozen), node.outputs[0].requires_grad)
        for node in way.graph.nodes
        if node.kind is NodeKind.LEAF
    ]


def frozen(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for parameter in net.parameters():
        parameter.requires_grad = False
    found: torch.Tensor = net(x)
    net.one.requires_grad_(True)  # type: ignore[union-attr, operator]
    net.two.requires_grad_(True)  # type: ignore[union-attr, operator]
    net.scale.requires_grad_(True)  # type: ignore[union-attr, operator]
    return found


def test_calls_know_which_parameters_are_frozen() -> None:
    assert recorded(lambda net, x: frozen(net, x) + net(x)) == [
        *(("one", 2, False), ("two", 2, False)),
        *(("one", 0, True), ("two", 0, True)),
    ]


def test_code_between_modules_reads_them_without_a_gradient() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        scale = net.scale.requires_grad_(False)
        frozen = x * scale
        assert not frozen.requires_grad
        scale.requires_grad = True
        assert (x * scale).requires_grad
        return net(frozen)

    assert recorded(body) == [("one", 0, True), ("two", 0, True)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda net, x: (net(x), net.one.requires_grad_(False))[0], "left so"),
        (lambda net, x: (net.kept.requires_grad_(True), net(x))[1], "from False to True"),
    ],
    ids=["left", "unfrozen"],
)
def test_what_ranks_could_not_follow_is_refused(body: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        recorded(body)
