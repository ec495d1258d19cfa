"""What a module may not share a rank's time for: state that its backward pass depends on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.tensors.nested import same, template
from smdistributed.modelparallel.torch.trial.turns import KeptTensors, differentiate, keeps_state

WIDTH = 4


class Counting(nn.Module):
    """A layer with state; ``before`` and ``later`` are what its two passes do besides."""

    def __init__(self, before: Callable[[Any], None], later: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH)
        self.count = 0
        self.log: list[Any] = []
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


def grow(module: Any, *args: Any) -> None:
    module.log.append(None)


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
    (grow, nothing, "its forward pass counts"),
    (keep, nothing, ""),
    (nothing, count, ""),
    (nothing, write, "its backward pass writes to a tensor"),
    (nothing, write_elsewhere, "its backward pass writes to a tensor"),
    (read_gradient, nothing, "its forward pass reads gradients"),
]


def reason_of(plan: Plan, layer: nn.Module) -> str:
    (found,) = [each.in_turn for each in plan.graph.nodes if each.target is layer]
    return found


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
    found = reason_of(plan, layer)
    assert found.startswith(reason)
    assert bool(found) is bool(reason)
    assert bool(plan.in_turn) is bool(reason)
    # Nothing of the trial is left.
    assert layer.count == 0
    assert layer.plain.tolist() == [1] * WIDTH
    assert layer.scale.tolist() == [1] * WIDTH


def hook_of_a_node(x: torch.Tensor, later: Callable[[Any], Any]) -> torch.Tensor:
    x = x * 1
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda given: (later(given[0]),))
    return x


def later_hook_of_a_node(x: torch.Tensor, later: Callable[[Any], Any]) -> torch.Tensor:
    x = x * 1
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda made, _: (later(made[0]), *made[1:]))
    return x


def hook_of_what_is_kept(x: torch.Tensor, later: Callable[[Any], Any]) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, later):
        return x * x


class Hooked(nn.Linear):
    """A layer whose backward pass runs code that no hook of a tensor or a module shows."""

    def __init__(self, way: Callable[..., torch.Tensor], forward: bool, later: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.last = [torch.ones(WIDTH)]
        self.count = 0
        self._way = [way]
        self._changes = forward, later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._changes[0]:
            self.last = [x.detach()]
        return super().forward(self._way[0](x, self.later)) * (1 + self.count)

    def later(self, given: torch.Tensor) -> torch.Tensor:
        if self._changes[1]:
            self.count += 1
        return given * self.last[0]


@pytest.mark.parametrize("way", [hook_of_a_node, later_hook_of_a_node, hook_of_what_is_kept])
@pytest.mark.parametrize(
    ("forward", "later", "reason"),
    [
        (True, False, "its backward pass runs code, which may see what a forward pass"),
        (False, True, "its backward pass changes what its next forward pass reads"),
    ],
)
def test_code_is_found_by_whatever_way_it_comes_into_a_backward_pass(
    way: Any, forward: bool, later: bool, reason: str
) -> None:
    layer = Hooked(way, forward, later)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    step = Recorded(module, {"0": 0, "1": 0, "2": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = module(x).sum()
        step.backward(loss)
        return loss

    assert reason_of(step.plan(body, torch.ones(2, WIDTH)), layer).startswith(reason)
    assert layer.count == 0


def test_packages_collect_nothing_in_a_trial() -> None:
    seen: list[nn.Module] = []

    package: dict[str, Any] = {"__name__": pytest.__name__, "seen": seen}
    exec("def collect(module, args, result):\n    seen.append(module)", package)
    tried, plain = Hooked(hook_of_a_node, True, False), nn.Linear(WIDTH, WIDTH)
    for each in (tried, plain):
        each.register_forward_hook(package["collect"])
    step = Recorded(nn.Sequential(plain, tried, nn.Linear(WIDTH, WIDTH)), {"0": 0, "1": 0, "2": 1})
    plan = step.plan(lambda x: step.module(x).sum(), torch.ones(2, WIDTH))
    assert reason_of(plan, tried)
    assert not reason_of(plan, plain)
    assert seen.count(tried) == seen.count(plain) > 0


class Finder:
    """What packages put before Python's own finders of modules."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, *args: Any) -> None:
        self.names.append(name)


def test_finders_of_imports_are_no_code_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "torch.first_use"}
    exec("def hook(gradient):\n    import colorsys", namespace)
    finder = Finder()
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    module, x = nn.Linear(WIDTH, WIDTH), torch.ones(1, WIDTH)
    result = module(x)
    result.register_hook(namespace["hook"])
    assert not differentiate(module, x, result)
    assert finder.names == ["colorsys"]
    result.register_hook(lambda gradient: None)
    assert differentiate(module, x, result)


def test_what_is_collected_is_no_code_of_a_backward_pass() -> None:
    """It would be there on one rank, and not on another."""
    collections = []

    def collect(*args: Any) -> None:
        collections.append(args)

    layer = Counting(write, nothing)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    step = Recorded(module, {"0": 0, "1": 0, "2": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = module(x).sum()
        step.backward(loss)
        return loss

    threshold = gc.get_threshold()
    gc.callbacks.append(collect)
    gc.set_threshold(1)
    try:
        plan = step.plan(body, torch.ones(2, WIDTH))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collect)
    assert collections
    assert reason_of(plan, layer).startswith("its next forward pass writes")
    assert gc.isenabled()


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

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.plain = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.given is not None:
            self.given.data.mul_(2)
            self.plain.data.mul_(2)
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
