"""Gradients that a step asks for, where they pass through several partitions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.planning.products import product, total
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.random.keys import StepRandom

WIDTH = 4
Run = Callable[..., torch.Tensor]
ALTERNATING = {str(index): index % 2 for index in range(4)}


class Layer(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(self.linear(x)))


def run(plan: Plan, *inputs: torch.Tensor, cuts: bool = False) -> torch.Tensor:
    """Runs all segments in order; returns the result.

    Args:
        plan: of what.
        inputs: tensor arguments.
        cuts: segments are apart, as in a pipeline; else gradients flow through.
    """
    values: dict[int, torch.Tensor] = {}
    random = StepRandom(CPU)
    for segment in plan.segments:
        program = Program(plan, segment, CPU, random)
        given = [values[value.index] for value in segment.inputs]
        if cuts:
            given = [
                tensor.detach().requires_grad_(value.requires_grad)
                for tensor, value in zip(given, segment.inputs, strict=True)
            ]
        results = program.run(inputs, None, *given)
        values |= {
            value.index: result for value, result in zip(segment.outputs, results, strict=True)
        }
    return values[plan.graph.result[0].index]


def adversarial(model: Run, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    return model(x.detach() + 0.1 * slope).square().mean()


def penalty(model: Run, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out, [x], torch.ones_like(out), create_graph=True)
    return out.mean() + slope.square().sum()


def curvature(model: Run, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return curve.square().mean()


def product_by_trick(model: Run, x: torch.Tensor) -> torch.Tensor:
    def of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    _, found = torch.autograd.functional.hvp(of, x, x * 2)
    return model(x + 0.01 * found).square().mean()


def of_weights(model: Run, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    weights = list(model.parameters())  # type: ignore[attr-defined]
    slopes = torch.autograd.grad(loss, weights, create_graph=True)
    return loss + sum(each.square().sum() for each in slopes)


def matched(model: Any, x: torch.Tensor) -> torch.Tensor:
    x, weights = x.clone().requires_grad_(), list(model.parameters())
    found = torch.autograd.grad(model(x).square().mean(), weights, create_graph=True)
    apart = sum(each.square().sum() for each in found)
    (slope,) = torch.autograd.grad(apart, x, create_graph=True)
    return slope.square().sum()


def between_layers(model: Run, x: torch.Tensor) -> torch.Tensor:
    layers = list(model)  # type: ignore[call-overload]
    h = F.relu_(layers[0](x) * 2)
    h = layers[1](h)
    out = layers[3](layers[2](h))
    of_out, of_h, again = torch.autograd.grad(out, (out, h, h), x, create_graph=True)
    return (out * of_out).sum() + (of_h.mul_(3) * again).sum()


def of_both(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    h = model[1](model[0](x))
    out = model[3](model[2](h * h)).square().sum()
    of_x, of_h = torch.autograd.grad(out, (x, h), create_graph=True)
    (again,) = torch.autograd.grad(of_x.square().sum() + of_h.sum(), h, create_graph=True)
    return out + again.square().sum()


def net_of(*inner: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(*(each() for each in inner)) for _ in range(4)))


def planned(
    net: nn.Sequential, ask: Callable[[Run, torch.Tensor], torch.Tensor], x: torch.Tensor
) -> Plan:
    step = Recorded(net, ALTERNATING)

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = ask(net, x)
        step.backward(loss)
        return loss

    return step.plan(body, x)


@pytest.mark.parametrize(
    "ask", [adversarial, penalty, curvature, product_by_trick, of_weights, between_layers, of_both]
)
def test_gradients_are_those_of_one_process(ask: Callable[[Run, torch.Tensor], Any]) -> None:
    net = net_of(lambda: nn.BatchNorm1d(WIDTH))
    net, x = net.double(), torch.randn(8, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(net)
    expected = ask(plain, x)
    expected.backward()
    plan = planned(net, ask, x)
    before = copy.deepcopy(net.state_dict())
    assert torch.allclose(run(plan, x, cuts=True), expected)
    net.load_state_dict(before)
    found = run(plan, x)
    found.backward()
    assert torch.allclose(found, expected)
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, other.grad)
    for own, other in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(own, other)  # statistics were not written once more


class Trained:
    """A model whose ``backward`` counts by a share, as a microbatch's does."""

    def __init__(self, net: nn.Module, share: float, backward: Callable[[Any], None]) -> None:
        self.run, self._share, self._backward = net, share, backward

    def backward(self, loss: torch.Tensor) -> None:
        self._backward(loss * self._share)


def taken(model: Trained, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    model.backward(model.run(x).square().mean())
    return model.run((x - 9 * x.grad).detach()).square().mean()


def added_up(model: Trained, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    model.backward(model.run(x).square().mean())
    slope = x.grad
    assert slope is not None
    before = slope.clone()
    model.backward(model.run(x + slope).abs().mean())
    return model.run(x.detach() - slope * 3).square().mean() + before.norm()


def put_away(model: Trained, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    for _ in range(2):
        model.backward(model.run(x).square().mean())
        slope, x.grad = x.grad, None
    return model.run(x.detach() - slope * 3).square().mean()


def changed(model: Trained, x: torch.Tensor) -> torch.Tensor:
    change = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        model.backward(model.run(x + change).square().mean())
        with torch.no_grad():
            change.add_(change.grad)  # type: ignore[arg-type]
        change.grad.zero_()  # type: ignore[union-attr]
    return model.run(x + change).square().mean()


@pytest.mark.parametrize("ask", [taken, added_up, put_away, changed])
def test_gradients_of_backward_are_computed_with(
    ask: Callable[[Trained, torch.Tensor], torch.Tensor],
) -> None:
    net, x = net_of(), torch.randn(8, WIDTH)
    expected = ask(Trained(copy.deepcopy(net), 0.5, lambda loss: loss.backward()), x)
    step = Recorded(net, ALTERNATING)
    plan = step.plan(lambda x: ask(Trained(net, 1.0, step.backward), x), x)
    shares = [0.5 * each.tensor for each in plan.graph.constants]
    for cuts in (True, False):
        assert torch.allclose(run(plan, x, *shares, cuts=cuts), expected)


def test_what_only_the_end_needs_of_a_gradient_is_left_to_the_backward_pass() -> None:
    net, x = net_of(), torch.randn(8, WIDTH)
    step = Recorded(net, ALTERNATING)

    def body(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        step.backward(net(x).square().mean())
        return x.grad.sign()  # type: ignore[union-attr]

    plan = step.plan(body, x)
    assert not any(node.target in (torch.autograd.grad, product) for node in plan.graph.nodes)


def test_a_view_of_a_gradient_that_has_grown_is_refused() -> None:
    net, x = net_of(), torch.randn(8, WIDTH)
    step = Recorded(net, ALTERNATING)

    def body(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        step.backward(net(x).square().mean())
        view = x.grad.data  # type: ignore[union-attr]
        step.backward(net(x + view).square().mean())
        return net(x.detach() - view)

    with pytest.raises(UnsupportedError, match="a view of a gradient"):
        step.plan(body, x)


def test_a_weight_of_two_layers_has_the_sum_of_their_gradients() -> None:
    net, x = net_of(), torch.randn(2, WIDTH)
    net[2].linear.weight = net[0].linear.weight
    for ask in (of_weights, matched):
        plan, expected = planned(net, ask, x), ask(net, x)
        for cuts in (True, False):
            assert torch.allclose(run(plan, x, cuts=cuts), expected)


def test_what_is_computed_once_more_stays_where_it_was() -> None:
    plan = planned(net_of(), adversarial, torch.randn(2, WIDTH))
    for node in plan.graph.nodes:
        assert node.beside is None or node.rank == node.beside.rank
    # There, back, and there again.
    assert [segment.rank for segment in plan.segments] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    # What is computed for the example alone gets no gradients from the loss.
    assert plan.backward.isdisjoint({0, 1, 2, 3, 4, 5})


def test_what_one_segment_has_is_differentiated_where_it_is() -> None:
    def ask(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        h = model[0](x)
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        out: torch.Tensor = model[3](model[2](model[1](h + slope))).square().mean()
        return out

    plan = planned(net_of(), ask, torch.randn(2, WIDTH))
    assert not plan.comes_again
    assert plan.with_graph >= {0}


class Counting(nn.Module):
    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return layer


def batched(model: Run, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    starts = torch.stack([x.detach(), x.detach()])
    (slope,) = torch.autograd.grad(model(x), x, starts, is_grads_batched=True, create_graph=True)
    return slope.sum()


def overwritten(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    h = model[0](x) * 1
    out = model[3](model[2](model[1](h.detach() + h)))
    h.add_(1)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return (slope + h).sum()


@pytest.mark.parametrize(
    ("inner", "ask", "reason"),
    [
        ([Counting], penalty, "changes state in its forward"),
        ([hooked], of_weights, "has a hook on its gradient"),
        ([], batched, "is_grads_batched=True"),
        ([], overwritten, "changes in place"),
    ],
)
def test_what_cannot_be_computed_once_more_is_refused(
    inner: list[Callable[[], nn.Module]], ask: Callable[..., torch.Tensor], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        planned(net_of(*inner), ask, torch.randn(2, WIDTH))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.linear(x))
        return h, h.square()


def test_one_result_of_a_module_may_be_computed_from_another() -> None:
    def ask(model: Any, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        h, out = model[2](model[1](model[0](x)))
        found = model[3](out).sum() + h.sum()
        for _ in range(times):
            (found,) = torch.autograd.grad(found.square().sum(), h, create_graph=True)
        return found.square().sum()

    net, x = net_of(), torch.randn(2, WIDTH)
    net[2] = Pair()
    expected = ask(net, x)
    assert torch.allclose(run(planned(net, ask, x), x), expected)
    # The first gradient was computed from a copy of the result.
    with pytest.raises(UnsupportedError, match="computed with others of its results"):
        planned(net, functools.partial(ask, times=2), x)


def test_what_modules_keep_is_out_of_sight() -> None:
    def ask(model: Any, x: torch.Tensor) -> torch.Tensor:
        h = model[1](model[0](model[0](x)))
        (slope,) = torch.autograd.grad(model[3](model[2](h)).sum(), h, create_graph=True)
        return slope.sum()

    net = net_of()
    net[0] = Layer(Counting())
    with pytest.raises(UnsupportedError, match="keeps state and is called several times"):
        planned(net, ask, torch.randn(2, WIDTH))


def test_hooks_on_the_way_are_refused() -> None:
    def ask(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        h = model[1](model[0](x))
        h.register_hook(lambda gradient: gradient * 2)
        (slope,) = torch.autograd.grad(model[3](model[2](h)).sum(), x, create_graph=True)
        return slope.sum()

    with pytest.raises(UnsupportedError, match="an activation that has a hook"):
        planned(net_of(), ask, torch.randn(2, WIDTH))


def test_a_call_once_more_draws_what_it_drew() -> None:
    random = StepRandom(CPU)
    random.begin(7)
    random.enter_pass(0, backward=False)
    assert random.number_of_call("drop") == 0
    random.remember(3)
    assert [random.number_of_call("drop") for _ in range(2)] == [1, 2]
    random.enter_pass(1, backward=False)
    random.remember(3)
    random.enter_pass(0, backward=False)
    with random.once_more(3):
        assert [random.number_of_call("drop") for _ in range(2)] == [1, 2]
    assert random.number_of_call("drop") == 3
    random.end()


def test_a_sum_of_gradients_is_a_tensor_of_its_own() -> None:
    one = torch.ones(2)
    assert total(one).add_(1).sum() == 4
    assert one.sum() == 2
    (of_one,) = product([one], [one.clone().requires_grad_()], [one], [], False)
    assert not of_one.any()  # nothing flows


def test_a_module_that_decides_is_differentiated() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x * 3

    net = net_of()
    net[2] = Deciding()  # whose results on fakes are made apart from what it is given
    plan = planned(net, penalty, torch.randn(2, WIDTH))
    again = {node.target for node in plan.graph.nodes if node.beside is not None}
    assert any(isinstance(each, Layer) for each in again)
    slopes = [node.outputs for node in plan.graph.nodes if node.target is total]
    assert [value.requires_grad for (value,) in slopes] == [True]
