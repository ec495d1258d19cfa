"""What lies between modules, where it is compiled: which calls are one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.common.planning.pass_costs import OPERATIONS_A_BYTE
from smdistributed.modelparallel.torch.execute import compiled_runs
from smdistributed.modelparallel.torch.execute.compiled_runs import CompiledRuns, _tell
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.runs import (
    apart_from_runs,
    runs_of,
    work_of_run,
)
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.record.costs import flops
from smdistributed.modelparallel.torch.state.carried import CarriedObjects

# The compiler looks whether what it is given has gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH = 4
Between = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.register_buffer("offset", torch.rand(WIDTH))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self, self.first(x)))


def plan_of(between: Between, costs: ComputeCosts | None = None) -> Plan:
    torch.manual_seed(0)
    net = Net(between)
    step = Recorded(net, {"first": 0, "last": 1})
    step.costs = costs or step.costs

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x).mean()
        step.backward(loss)
        return loss

    return step.plan(body, torch.rand(2, WIDTH))


def names(between: Between) -> list[tuple[list[str], bool]]:
    """Returns the names of the nodes of the first segment, part by part."""
    plan = plan_of(between)
    apart = apart_from_runs(plan.graph, plan.late)
    return [
        ([node.name.rpartition(".")[2] for node in part], is_run)
        for part, is_run in runs_of(plan.segments[0].nodes, apart)
        if part
    ]


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[0] = 0
    return y.exp().tanh()


def in_place_later(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = y * y.detach().exp()
    y[0] = 0
    return z + y


def without_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.exp().tanh()
    return x.sin().cos() * scale


def without_use(net: Net, x: torch.Tensor) -> torch.Tensor:
    seen = (x.mean(0) * net.weight).tanh()
    y = x.sin().cos()
    return y + F.linear(y, seen).detach()


BETWEEN: dict[str, tuple[Between, list[tuple[int, bool]]]] = {
    # The input and the first module; then the run. Its buffer comes before it.
    "run": (lambda net, x: x.tanh() + net.offset, [(3, False), (2, True)]),
    "views in it": (lambda net, x: x.tanh().t().t().exp(), [(2, False), (4, True)]),
    "one kernel": (lambda net, x: x.tanh().t().t(), [(5, False)]),
    "views alone": (lambda net, x: x.t()[:, :].t(), [(5, False)]),
    "two kernels": (lambda net, x: F.log_softmax(x, -1).exp(), [(2, False), (2, True)]),
    "random": (lambda net, x: F.dropout(x, 0.5).exp().tanh(), [(3, False), (2, True)]),
    "random within": (
        lambda net, x: F.dropout(x.exp().tanh(), 0.5).exp().tanh(),
        [(2, False), (2, True), (1, False), (2, True)],
    ),
    "product with a weight": (
        lambda net, x: F.linear(x.exp().tanh(), net.weight).exp(),
        [(3, False), (2, True), (2, False)],
    ),
    "in place": (in_place, [(4, False), (2, True)]),
    "in place later": (in_place_later, [(8, False)]),
    "without gradient": (without_gradient, [(2, False), (2, True), (3, True)]),
    # The weight has no gradient, not one of zeros.
    "without use": (without_use, [(6, False), (2, True), (3, False)]),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_runs(name: str) -> None:
    between, wanted = BETWEEN[name]
    found = names(between)
    assert [(len(part), is_run) for part, is_run in found] == wanted, found


def compute(plan: Plan, compiled: CompiledRuns | None) -> list[Any]:
    """Returns the result and the gradients of all parameters."""
    torch.manual_seed(1)
    x = torch.rand(2, WIDTH)
    values: dict[int, torch.Tensor] = {}
    for segment in plan.segments:
        program = Program(plan, segment, CPU, StepRandom(CPU), compiled)
        given = (x, *(each.tensor for each in plan.graph.constants))
        arguments = [values[value.index] for value in segment.inputs]
        results = program.run(given, CarriedObjects(), *arguments)
        values |= {value.index: each for value, each in zip(segment.outputs, results, strict=True)}
    (loss,) = (values[value.index] for value in plan.graph.roots)
    modules = plan.modules(range(len(plan.segments)))
    parameters = list(dict.fromkeys(each for module in modules for each in module.parameters()))
    return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]


@pytest.mark.parametrize("name", [name for name in BETWEEN if "random" not in name])
def test_the_numbers_are_the_same(name: str) -> None:
    plan = plan_of(BETWEEN[name][0])
    compiled = CompiledRuns({"backend": "aot_eager"})
    torch.testing.assert_close(compute(plan, compiled), compute(plan, None), rtol=0, atol=0)
    assert bool(compiled._known) == any(is_run for _, is_run in BETWEEN[name][1])


class Counting:
    """A backend that counts the graphs that it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x).exp() + x).tanh()
        return x


def test_layers_share_what_is_compiled() -> None:
    net = Layers()
    step = Recorded(net, {f"layers.{index}": index // 3 for index in range(6)})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x).sum()
        step.backward(loss)
        return loss

    plan, backend = step.plan(body, torch.rand(2, WIDTH)), Counting()
    compute(plan, CompiledRuns({"backend": backend}))
    # The first layer's input has no gradient; the last run has the loss in it.
    assert backend.count == 3


def test_what_the_compiler_refuses_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("not on this machine")

    _tell.cache_clear()
    plan = plan_of(BETWEEN["run"][0])
    found = compute(plan, CompiledRuns({"backend": refuse}))
    torch.testing.assert_close(found, compute(plan, None), rtol=0, atol=0)
    assert "not on this machine" in caplog.text


def test_the_user_s_errors_are_the_user_s() -> None:
    compiled = CompiledRuns({"backend": "aot_eager"})
    run = compiled.of("def run(v7):\n    return (c1(v7, v7),)", {"c1": torch.mm}, None)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(torch.ones(2, 3))


def test_what_is_called_tells_functions_apart() -> None:
    compiled = CompiledRuns({"backend": "eager"})
    for function in (torch.exp, torch.sin, torch.exp):
        run = compiled.of("def run(v1):\n    return (c1(v1),)", {"c1": function}, None)
        torch.testing.assert_close(run(torch.ones(2)), (function(torch.ones(2)),))
    assert len(compiled._known) == 2


def test_many_runs_are_no_forms_of_one() -> None:
    """PyTorch compiles a function in eight forms, and others raise an error."""
    compiled = CompiledRuns({"backend": "eager"})
    for number in range(12):
        run = compiled.of(f"def run(v1):\n    return (v1 * {number},)", {}, None)
        torch.testing.assert_close(run(torch.ones(2)), (torch.full((2,), float(number)),))


def test_what_is_compiled_too_often_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    _tell.cache_clear()
    compiled = CompiledRuns({"backend": "eager"})
    run = compiled.of("def run(v1):\n    return (v1 + 1,)", {}, None)
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (2, 3):
            torch.testing.assert_close(run(torch.ones(size)), (torch.full((size,), 2.0),))
    assert "functions between two modules are not compiled" in caplog.text


def test_so_many_are_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _tell.cache_clear()
    monkeypatch.setattr(compiled_runs, "_MOST_COMPILED", 2)
    backend, x = Counting(), torch.ones(2)
    compiled = CompiledRuns({"backend": backend})
    for number in range(4):
        run = compiled.of(f"def run(v1):\n    return (v1 * {number},)", {}, None)
        torch.testing.assert_close(run(x), (x * number,))
    assert backend.count == 2
    assert "2 different ones are already" in caplog.text


def test_shapes_are_compiled_apart() -> None:
    """The compiler gives up where one function has come in too many."""
    backend = Counting()
    compiled = CompiledRuns({"backend": backend})
    for size in range(1, 11):
        run = compiled.of("def run(v1):\n    return (v1 * 2,)", {}, size)
        assert run(torch.ones(size))[0].shape == (size,)
    assert backend.count == 10


def test_names_of_python_are_no_variables() -> None:
    compiled = CompiledRuns({"backend": "eager"})
    source = "def run(v7):\n    return (c1(v7, slice(0, 1)),)"
    run = compiled.of(source, {"c1": torch.Tensor.__getitem__}, None)
    assert run(torch.ones(2))[0].shape == (1,)


def test_a_run_costs_what_goes_in_and_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_is_on_gpu", lambda out: True)
    between: Between = lambda net, x: x.exp().tanh().sin().cos()  # noqa: E731
    separate, together = (
        plan_of(between, ComputeCosts(compiles_runs=compiles)).segments[0]
        for compiles in (False, True)
    )
    (run,) = (part for part, is_run in runs_of(together.nodes, set()) if is_run)
    a_tensor = 2 * WIDTH * 4 * OPERATIONS_A_BYTE
    assert sum(node.work.flops for node in run) == 4 * 2 * a_tensor
    assert work_of_run(run, set(together.outputs)).flops == 2 * a_tensor
    assert separate.costs.forward - together.costs.forward == (8 - 2) * a_tensor


def test_what_lies_between_modules_weighs_less_in_the_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flops, "_is_on_gpu", lambda out: True)

    def weight(*, compiles: bool) -> float:
        net = Net(lambda net, x: x.exp().tanh())
        step = Recorded(net, {"first": 0, "last": 1})
        step.costs = ComputeCosts(compiles_runs=compiles)
        placement = step.place(net, torch.rand(2, WIDTH))
        return sum(unit.compute for unit in placement.assignment.placed if not unit.name)

    a_tensor = 2 * WIDTH * 4 * OPERATIONS_A_BYTE
    # Of two operations, each with two tensors; forward, and backward two and a half times that.
    assert weight(compiles=False) == 3.5 * 4 * a_tensor
    assert weight(compiles=True) == weight(compiles=False) / 4
