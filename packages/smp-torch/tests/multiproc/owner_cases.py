"""Sharded optimizer state: each parameter is updated by one rank, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from half_cases import adam, batches, momentum, net, same_bits
from reference import own_share, run_plain
from trained_beside import Make, body, trained_beside

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.gradients.elsewhere import GradientElsewhere


def trained(make: Make, max_norm: float | None) -> None:
    """Losses, norms and parameters of one process, over ten steps."""
    _, model = trained_beside(net, make, batches(10), max_norm=max_norm)
    for name, parameter in model.local_named_parameters():
        same_bits(parameter.detach(), smp.allgather(parameter.detach(), smp.DP_GROUP)[0], name)


def case_every_parameter_has_one_owner() -> None:
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    data = own_share(batches(1)[0], [0, 0])
    smp.step(body)(model, *data)
    names = dict(model.local_named_parameters())
    assert all(each.grad is not None for each in names.values())
    with_gradient = [
        name for name, each in names.items() if not isinstance(each.grad, GradientElsewhere)
    ]
    optimizer.step()
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    owned = [name for name, each in names.items() if id(each) in held]
    assert sorted(owned) == sorted(with_gradient)  # the others have theirs elsewhere
    assert set(optimizer.state) == {names[name] for name in owned}
    everywhere = smp.allgather(owned, smp.DP_GROUP)
    assert sorted(name for each in everywhere for name in each) == sorted(names)
    sizes = [sum(names[name].numel() for name in each) for each in everywhere]
    largest = max(each.numel() for each in names.values())
    assert max(sizes) - min(sizes) <= largest


def case_state_is_that_of_one_process() -> None:
    """A plain optimizer goes on with the whole state; a wrapped one with its part or the whole."""
    reference, model = net(), smp.DistributedModel(net())
    plain = adam(reference.parameters())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    step = smp.step(body)
    data = batches(4)
    for each in data[:3]:
        plain.zero_grad()
        optimizer.zero_grad()
        run_plain(reference, body, each)
        step(model, *own_share(each, [0, 0]))
        plain.step()
        optimizer.step()
    whole = copy.deepcopy(optimizer.state_dict())
    for number, values in plain.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.allclose(
                whole["state"][number][key].cpu(), value.cpu(), rtol=1e-4, atol=1e-7
            )
    fresh = adam(reference.parameters())
    fresh.load_state_dict(whole)
    own = copy.deepcopy(optimizer.local_state_dict(gather_if_shard=False))
    gathered = copy.deepcopy(optimizer.local_state_dict())
    shards = gathered["state"]
    assert len(shards) == smp.rdp_size()
    assert set(own["state"]) <= set(shards[smp.rdp_rank()])
    assert sorted(name for each in shards for name in each) == sorted(
        name for name, _ in model.local_named_parameters()
    )
    chosen = {**gathered, "state": shards[smp.rdp_rank()]}
    weights = copy.deepcopy(model.state_dict())

    def go(model: Any, optimizer: Any) -> list[torch.Tensor]:
        optimizer.zero_grad()
        step(model, *own_share(data[3], [0, 0]))
        optimizer.step()
        return [each.detach().clone() for each in model.local_parameters()]

    want = go(model, optimizer)
    for state in (whole, own, gathered, chosen):
        other = smp.DistributedModel(net())
        its_optimizer = smp.DistributedOptimizer(adam(other.parameters()))
        other.load_state_dict(weights)
        its_optimizer.load_state_dict(state)
        for one, two in zip(go(other, its_optimizer), want, strict=True):
            same_bits(one, two, "parameter")


def case_gradients_of_several_steps_add_up() -> None:
    """Without ``zero_grad`` between; outside of steps that is refused."""
    reference, model = net(), smp.DistributedModel(net())
    plain = momentum(reference.parameters())
    optimizer = smp.DistributedOptimizer(momentum(model.parameters()))
    step = smp.step(body)
    for number, each in enumerate(batches(6)):
        run_plain(reference, body, each)
        step(model, *own_share(each, [0, 0]))
        if number % 3 == 2:
            for one in (plain, optimizer):
                one.step()
                one.zero_grad()
            state = model.state_dict()
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(
                    state[name], parameter.detach().to(state[name].device), rtol=1e-5, atol=1e-6
                )
    if smp.pp_size() > 1:
        return
    model(batches(1)[0][0][:1]).sum().backward()
    with pytest.raises(UnsupportedError, match="outside of step functions cannot be added up"):
        model(batches(1)[0][0][:1]).sum().backward()
    model.zero_grad()


def case_what_needs_every_gradient_is_refused() -> None:
    model = smp.DistributedModel(net())
    with pytest.raises(UnsupportedError, match="a gradient goes to the one that updates"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UnsupportedError, match="give every rank the same number"), model.join():
        pass


#: What comes first after a step function.
NEXT: dict[str, Callable[[Any, Any], object]] = {
    "update": lambda model, optimizer: optimizer.step(),
    "clip": lambda model, optimizer: smp.clip_grad_norm_(model.parameters(), 1.0),
}


def body_without(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns a result of which nothing is differentiated."""
    return model(inputs).detach().mean()


def differing(act: Callable[[Any, Any], object], number: int) -> None:
    """Has the last replica leave out a backward pass, after a number of steps of all."""
    data = own_share(batches(1)[0], [0, 0])
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(momentum(model.parameters()))
    train, look = smp.step(body), smp.step(body_without)
    for _ in range(number):
        train(model, *data)
        optimizer.step()
        optimizer.step()  # which no rank has made a backward pass for
        look(model, *data)
    step = look if smp.dp_rank() == smp.dp_size() - 1 else train
    step(model, *data)
    act(model, optimizer)


def case_a_rank_without_a_backward_pass_is_told() -> None:
    """At once, on every rank; where no rank makes one nothing happens."""
    for act in NEXT.values():
        for number in (0, 1):
            with pytest.raises(SMPError, match="must make a backward pass before") as raised:
                differing(act, number)
            assert "received none from rank" in str(raised.value)
            assert len(set(smp.allgather(str(raised.value), smp.DP_GROUP))) == 1
            if smp.pp_size() > 1:
                return  # a step failed while other partitions computed theirs: none can follow


CASES: dict[str, Callable[[], None]] = {
    "adam": lambda: trained(adam, None),
    "momentum_clipped": lambda: trained(momentum, 0.05),
    "every_parameter_has_one_owner": case_every_parameter_has_one_owner,
    "state_is_that_of_one_process": case_state_is_that_of_one_process,
    "gradients_of_several_steps_add_up": case_gradients_of_several_steps_add_up,
    "what_needs_every_gradient_is_refused": case_what_needs_every_gradient_is_refused,
    # The last: no step of the same processes can follow where there are partitions.
    "a_rank_without_a_backward_pass_is_told": case_a_rank_without_a_backward_pass_is_told,
}
