"""What a module may not share a rank's time for: state that its backward pass depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.nested import same, template
from smdistributed.modelparallel.torch.record.turns import KeptTensors, keeps_state

WIDTH = 4


class Counting(nn.Module):
    """A layer with state; ``before`` and ``later`` are what its two passes do besides."""

    def __init__(self, before: Callable[[Any], None], later: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH)
        self.count = 0
        self._before = [before]
        self._later = [later]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._before[0](self)
        out: torch.Tensor = self.linear(x * self.scale)
        if self._later[0] is not nothing:
            out.register_hook(self.later)
        return out * self.plain

    def later(self, gradient: torch.Tensor) -> Any:
        return self._later[0](self, gradient)


def nothing(*args: Any) -> None:
    """Does nothing."""


def count(module: Any, *args: Any) -> None:
    module.count += 1


def keep(module: Any, *args: Any) -> None:
    module.last = [module.linear.weight.detach() * 2]


def write(module: Any, *args: Any) -> None:
    module.scale.data.mul_(2)


def write_elsewhere(module: Any, *args: Any) -> None:
    module.plain.data.mul_(2)


def read_count(module: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * module.count


def read_gradient(module: Any) -> None:
    if module.linear.weight.grad is not None:
        module.count = 1


CASES = [
    (nothing, nothing, ""),
    (write, nothing, "its next forward pass writes to what its backward pass computes with"),
    (write_elsewhere, nothing, "its forward pass writes to a tensor that is no parameter"),
    (count, read_count, "its backward pass runs code, which may see what a forward pass"),
    (count, count, "its backward pass runs code, which may see what a forward pass"),
    (count, nothing, "its forward pass counts"),
    (keep, nothing, ""),
    (nothing, count, ""),
    (nothing, write, "its backward pass writes to a tensor"),
    (nothing, write_elsewhere, "its backward pass writes to a tensor"),
    (read_gradient, nothing, "its forward pass reads gradients"),
]


@pytest.mark.parametrize(("before", "later", "reason"), CASES)
def test_layers_whose_passes_depend_on_their_order_are_found(
    before: Any, later: Any, reason: str
) -> None:
    layer = Counting(before, later)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    step = Recorded(module, {"0": 0, "1": 0, "2": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = module(x).sum()
        step.backward(loss)
        return loss

    plan = step.plan(body, torch.ones(2, WIDTH))
    found = [each.in_turn for each in plan.graph.nodes if each.target is layer]
    assert len(found) == 1
    assert found[0].startswith(reason)
    assert bool(found[0]) is bool(reason)
    assert bool(plan.in_turn) is bool(reason)
    # Nothing of the trial is left.
    assert layer.count == 0
    assert layer.plain.tolist() == [1] * WIDTH
    assert layer.scale.tolist() == [1] * WIDTH


def test_statistics_alone_are_no_reason() -> None:
    norm, other = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    assert not keeps_state({norm: {"running_mean", "running_var", "num_batches_tracked"}})
    assert keeps_state({norm: {"running_mean", "momentum"}})
    assert keeps_state({other: {"weight"}})


class Function(torch.autograd.Function):
    """Keeps one tensor by torch, and one by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.own = own
        return x * own

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.own, None


@pytest.mark.parametrize("kept", ["x", "weight", "own"])
def test_what_a_backward_pass_computes_with_is_found(kept: str) -> None:
    tensors = {
        "x": torch.ones(WIDTH, requires_grad=True),
        "weight": torch.ones(WIDTH, requires_grad=True),
        "own": torch.ones(WIDTH),
        "other": torch.ones(WIDTH, requires_grad=True),
    }
    result = Function.apply(tensors["x"] * tensors["weight"], tensors["own"]) + tensors["other"]
    found = KeptTensors([tensors["x"]], result)
    assert not found.are_written()
    with torch.no_grad():
        tensors["other"].add_(1)
        assert not found.are_written()
        tensors[kept].add_(1)
    assert found.are_written()


def test_statistics_are_kept_and_not_computed_with() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    found = KeptTensors([], norm(torch.ones(2, WIDTH)))
    assert norm.running_mean is not None
    norm.running_mean.add_(1)
    assert not found.are_written()
    with torch.no_grad():
        norm.weight.add_(1)
    assert found.are_written()


def test_methods_of_modules_are_constants() -> None:
    """A copy of one would copy the module with the stand-ins that it has meanwhile."""
    module = nn.Linear(WIDTH, WIDTH)

    def no_copy(obj: Any) -> Any:
        raise AssertionError(f"{obj} is taken for an object with state")

    kept = template({"call": module.extra_repr}, nothing, no_copy)
    assert kept["call"].__self__ is module
    assert same(kept, {"call": module.extra_repr}, lambda one, other: False)
    assert not same(kept, {"call": module.requires_grad_}, lambda one, other: False)
    assert not same(kept, {"call": nn.Linear(2, 2).extra_repr}, lambda one, other: False)


class Rewriting(nn.Linear):
    """Writes to what its former call was given."""

    given: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.given is not None:
            self.given.data.mul_(2)
        self.given = x.detach()
        return super().forward(x)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_layer_called_again_may_not_write_to_activations_unseen(num_calls: int) -> None:
    layer = Rewriting(WIDTH, WIDTH)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(first, *[layer] * num_calls, last)
    step = Recorded(module, {"0": 0, "1": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = module(x).sum()
        step.backward(loss)
        return loss

    if num_calls == 1:
        assert step.plan(body, torch.ones(2, WIDTH)).in_turn
    else:
        with pytest.raises(UnsupportedError, match="earlier call was given"):
            step.plan(body, torch.ones(2, WIDTH))
