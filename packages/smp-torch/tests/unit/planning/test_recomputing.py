"""Checkpointed calls that write state: in the order of one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.recomputing import how_again, parts_of
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.calls.regions import Again, Region

WIDTH = 4
X = torch.ones(2, WIDTH)


class Norm(nn.BatchNorm1d):
    """Checkpoints itself if it is told to."""

    own = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]
        return super().forward(x)


class Logging(nn.Linear):
    """Keeps a log that it computes with."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.log: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(1)
        return super().forward(x) * len(self.log)


class Averaging(nn.Linear):
    """Keeps an average that nothing is computed with."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class Outer(nn.Module):
    """Checkpoints what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Normalizes between two partitions.

    Args:
        around: calls the model's parts on the result of the first one.
    """

    def __init__(self, around: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.other = Norm(WIDTH), Norm(WIDTH)
        self.register_buffer("offset", torch.ones(WIDTH))
        self._around = [around]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self._around[0](self, self.first(x)))  # type: ignore[no-any-return]


def once(function: Callable[..., Any], x: torch.Tensor, how: bool = False) -> Any:
    return checkpoint(function, x, use_reentrant=how)


def plan(around: Callable[..., Any], prepare: Callable[[Net], object] = lambda net: None) -> Plan:
    net = Net(around)
    prepare(net)
    recorded = Recorded(net, {"first": 0, "norm": 0, "other": 1, "last": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x).sum()
        recorded.backward(loss)
        return loss

    return recorded.plan(body, X)


def has_own(net: Net) -> None:
    net.norm.own = True


@pytest.mark.parametrize("reentrant", [False, True])
def test_microbatches_take_turns_where_statistics_are_written_again(reentrant: bool) -> None:
    assert plan(lambda net, x: once(net.norm, x, reentrant)).in_turn
    assert plan(lambda net, x: net.norm(x), has_own).in_turn


def test_microbatches_take_turns_where_an_average_is_written_again() -> None:
    def average(net: Net) -> None:
        net.norm = Averaging()  # type: ignore[assignment]

    assert not plan(lambda net, x: net.norm(x), average).in_turn
    assert plan(lambda net, x: once(net.norm, x), average).in_turn


def test_they_overlap_where_nothing_is_written_again() -> None:
    assert not plan(lambda net, x: net.norm(x)).in_turn
    assert not plan(lambda net, x: once(torch.tanh, net.norm(x))).in_turn
    assert not plan(lambda net, x: once(net.norm, x), lambda net: net.eval()).in_turn
    assert not plan(lambda net, x: net.norm(x), lambda net: (has_own(net), net.eval())).in_turn
    assert not plan(lambda net, x: x + torch.no_grad()(once)(net.norm, x)).in_turn


def test_what_a_part_of_a_module_keeps_is_the_modules_own() -> None:
    def hold(net: Net) -> None:
        net.norm = Outer(Logging())  # type: ignore[assignment]

    assert plan(lambda net, x: net.norm(x), hold).in_turn


def ways(cut: Plan) -> list[Again]:
    """Returns how the parts of its regions are computed again, in order."""
    return [
        how_again(cut.graph, part)
        for segment in cut.segments
        for region, part in parts_of(segment.nodes)
        if region is not None
    ]


def test_a_part_that_keeps_state_is_computed_again_as_far_as_in_one_process() -> None:
    def across(net: Net, x: torch.Tensor) -> Any:
        return once(lambda x: net.other(torch.tanh(net.norm(x))), x)

    def to_the_end(net: Net, x: torch.Tensor) -> Any:
        with set_checkpoint_early_stop(False):
            return once(net.norm, x)

    assert ways(plan(across)) == [Again.TO_THE_END, Again.AS_NEEDED]
    assert ways(plan(across, lambda net: net.eval())) == [Again.AS_NEEDED] * 2
    assert ways(plan(to_the_end)) == [Again.TO_THE_END]
    assert ways(plan(lambda net, x: once(net.norm, x, True))) == [Again.REENTRANT]
    assert ways(plan(lambda net, x: once(torch.tanh, x, True))) == [Again.AS_NEEDED]


def test_what_is_read_for_the_first_time_does_not_divide_a_region() -> None:
    found = plan(lambda net, x: once(lambda x: net.norm(net.norm(x) * net.offset), x))
    assert ways(found) == [Again.AS_NEEDED]


def nested(net: Net, x: torch.Tensor) -> Any:
    return once(lambda x: once(net.norm, x), x)


def with_a_write_outside(net: Net, x: torch.Tensor) -> Any:
    base = x * 1
    return once(lambda x: net.norm(x) + base.add_(1).mean().detach(), x)


def on_both_sides(net: Net, x: torch.Tensor) -> Any:
    return once(lambda x: net.norm(net.other(torch.tanh(net.norm(x)))), x)


REFUSED = {
    nested: "in two checkpointed calls",
    with_a_write_outside: "cannot be computed again",
    on_both_sides: "on both sides of another partition",
}


@pytest.mark.parametrize("around", REFUSED)
def test_state_that_would_end_otherwise_is_refused(around: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[around]):
        plan(around)
    plan(around, lambda net: net.eval())


def test_what_gives_something_else_again_is_refused_before_another_partition() -> None:
    """In one process that is what the other modules are given again."""

    def keep_a_log(net: Net) -> None:
        net.norm = Logging()  # type: ignore[assignment]

    def across(net: Net, x: torch.Tensor) -> Any:
        return once(lambda x: net.other(net.norm(x)), x)

    with pytest.raises(UnsupportedError, match=r"norm .* with modules on another partition"):
        plan(across, keep_a_log)
    plan(lambda net, x: net.other(once(net.norm, x)), keep_a_log)


def test_what_a_checkpointed_call_is_inside_of() -> None:
    outer = Region(0, Again.AS_NEEDED)
    found = plan(nested, lambda net: net.eval())
    (leaf,) = [node for node in found.graph.nodes if node.name == "norm"]
    assert leaf.region == outer._replace(depth=2)
