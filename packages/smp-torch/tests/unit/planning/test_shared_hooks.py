"""Hooks on gradients that belong together: exact in one backward pass, else refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.shared_hooks import check_shared_hooks
from smdistributed.modelparallel.torch.record.leaves.gradient_hooks import GradientHooks, Moment

WIDTH = 4
Tensors = Sequence[torch.Tensor]
Put = Callable[[Tensors, Callable[[Any], Any]], object]


def each(tensors: Tensors, hook: Callable[[Any], Any]) -> object:
    return [tensor.register_hook(hook) for tensor in tensors]  # type: ignore[no-untyped-call]


def after(tensors: Tensors, hook: Callable[[Any], Any]) -> object:
    def accumulated(tensor: torch.Tensor) -> None:
        hook(tensor.grad)

    return [tensor.register_post_accumulate_grad_hook(accumulated) for tensor in tensors]  # type: ignore[no-untyped-call]


def before_nodes(tensors: Tensors, hook: Callable[[Any], Any]) -> object:
    nodes = [get_gradient_edge(tensor).node for tensor in tensors]
    for node in nodes:
        node.register_prehook(lambda given: hook(given[0]))
    return nodes


def behind_nodes(tensors: Tensors, hook: Callable[[Any], Any]) -> object:
    nodes = [get_gradient_edge(tensor).node for tensor in tensors]
    for node in nodes:
        node.register_hook(lambda got, given: hook(given[0]))
    return nodes


ROADS: dict[str, Put] = {
    "each": each,
    "after": after,
    "before nodes": before_nodes,
    "behind nodes": behind_nodes,
}


def counting() -> Callable[[Any], Any]:
    calls = [0]

    def count(gradient: torch.Tensor) -> None:
        calls[0] += 1

    return count


def adding_up() -> Callable[[Any], Any]:
    total = torch.zeros(())

    def add(gradient: torch.Tensor) -> None:
        total.add_(gradient.norm())

    return add


def waiting_for_all() -> Callable[[Any], Any]:
    seen: list[torch.Tensor] = []

    def wait(gradient: torch.Tensor) -> None:
        seen.append(gradient)
        if len(seen) == 2:
            torch._foreach_mul_(seen, 0.5)
            seen.clear()

    return wait


#: What hooks do that share something.
SHARING = {"counting": counting, "adding up": adding_up, "waiting for all": waiting_for_all}


def logging() -> Callable[[Any], Any]:
    log: list[float] = []
    return lambda gradient: log.append(float(gradient.norm()))


def noise() -> Callable[[Any], Any]:
    return lambda gradient: gradient.add_(torch.randn_like(gradient))


def failing() -> Callable[[Any], Any]:
    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("a parameter of another model")

    return fail


#: What hooks do that share nothing.
ALONE = {"logging": logging, "noise": noise, "failing": failing}


class Hooked:
    """A model on two partitions with hooks on gradients, and what is checked of it."""

    def __init__(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.recorded = Recorded(self.net, {"0": 0, "1": 0, "2": 1, "3": 1})

    def check(self) -> None:
        def body(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.net(x).square().mean()
            self.recorded.backward(loss)
            return loss

        plan = self.recorded.plan(body, torch.ones(2, WIDTH))
        hooks = self.recorded.fakes.hooks
        hooks.look(self.recorded.fakes.named_parameters())
        check_shared_hooks(plan, hooks.found)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_gradients_gets_them_in_one_pass(mode: Any) -> None:
    hooked = Hooked()
    first, second, third, _ = (layer.weight for layer in hooked.net)
    register_multi_grad_hook([first, second], max, mode=mode)
    register_multi_grad_hook([first, second], lambda given: None, mode=mode)
    hooked.check()
    handle = register_multi_grad_hook([second, third], lambda given: None, mode=mode)
    with pytest.raises(UnsupportedError, match=r"1\.weight, 2\.weight in one .* Put hooks that"):
        hooked.check()
    handle.remove()
    hooked.check()


def test_a_hook_of_tensors_that_are_no_parameters_is_refused() -> None:
    hooked = Hooked()
    other = torch.ones(1, requires_grad=True)
    register_multi_grad_hook([hooked.net[0].weight, other], lambda given: None)
    with pytest.raises(
        UnsupportedError, match=r"0\.weight and of 1 tensors that are no parameters"
    ):
        hooked.check()


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("road", ROADS)
def test_hooks_share_what_one_pass_shares(road: str, sharing: str) -> None:
    hooked = Hooked()
    first, second, third, _ = (layer.weight for layer in hooked.net)
    kept = [ROADS[road]([first, second], SHARING[sharing]())]
    hooked.check()
    kept.append(ROADS[road]([second, third], SHARING[sharing]()))
    first.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(
        UnsupportedError, match=r"a hook on the gradient of .* shares with hooks of"
    ):
        hooked.check()
    assert torch.equal(first.grad, torch.ones(WIDTH, WIDTH))
    assert third.grad is None


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("road", ROADS)
def test_hooks_that_share_nothing_may_be_anywhere(road: str, alone: str) -> None:
    hooked = Hooked()
    state = torch.get_rng_state()
    kept = ROADS[road]([each.weight for each in hooked.net], ALONE[alone]())
    hooked.check()
    assert kept
    assert torch.equal(torch.get_rng_state(), state)


def test_what_hooks_change_is_put_back() -> None:
    hooked = Hooked()
    counts, log, total = {"calls": 0}, [1], torch.zeros(())

    def hook(gradient: torch.Tensor) -> None:
        log.append(2)
        counts["calls"] += 1
        total.add_(1)

    each([layer.weight for layer in hooked.net], hook)
    with pytest.raises(UnsupportedError, match="changes a tensor, which it shares"):
        hooked.check()
    assert (counts, log, total.item()) == ({"calls": 0}, [1], 0)


def test_hooks_are_followed() -> None:
    weight, hooks = nn.Parameter(torch.ones(2)), GradientHooks()
    named = {"weight": weight}
    assert not hooks.follow(lambda: named)
    weight.register_hook(len)  # type: ignore[no-untyped-call]
    assert not hooks.follow(lambda: named), "it is no code of the user's"
    handle = weight.register_hook(counting())  # type: ignore[no-untyped-call]
    assert hooks.follow(lambda: named)
    assert not hooks.follow(lambda: named)
    (found,) = hooks.found
    assert (found.name, found.moment) == ("weight", Moment.GRADIENT)
    weight.register_hook(counting())  # type: ignore[no-untyped-call]
    hooks.leave_out(lambda: named)
    hooks.look(named)
    assert [each.key for each in hooks.found] == [found.key], "a module has put the other one"
    handle.remove()
    hooks.look(named)
    assert not hooks.found
