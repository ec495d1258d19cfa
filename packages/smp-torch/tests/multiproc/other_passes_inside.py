"""Passes that differ inside a module of a pipeline give what one process gives, or are refused.

A module that decides by numbers is one call to a pipeline: what it leaves out for the examples of
one rank, by ``detach`` say, nobody sees before its backward pass. A population of ways in which
it leaves out something, of partitions and moments, tried as in ``other_passes``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from other_passes import (
    FORWARDS,
    MICROBATCHES,
    MOMENTS,
    Net,
    Training,
    both,
    hidden,
    plainly,
    population_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp

Found = tuple[torch.Tensor, torch.Tensor]


def heads_detached(net: Net, states: torch.Tensor) -> Found:
    one, other = plainly(net, states)
    return (one.detach(), other.detach()) if net.is_odd else (one, other)


def one_result_detached(net: Net, states: torch.Tensor) -> Found:
    one, other = plainly(net, states)
    return one.detach() if net.is_odd else one, other


def heads_of_nothing(net: Net, states: torch.Tensor) -> Found:
    one, other = plainly(net, states)
    return (torch.zeros_like(one), torch.zeros_like(other)) if net.is_odd else (one, other)


def one_head_for_both(net: Net, states: torch.Tensor) -> Found:
    one, other = plainly(net, states)
    return one, one[:, :4] if net.is_odd else other


def times_zero(net: Net, states: torch.Tensor) -> Found:
    one, other = plainly(net, states)
    return one, 0 * other if net.is_odd else other


def detached_in_checkpoints(net: Net, states: torch.Tensor, *, use_reentrant: bool) -> Found:
    # What is given no gradient has none in the other kind: ranks would have no part in it.
    states = net.norm(states)
    found = checkpoint(lambda each: hidden(net, each), states, use_reentrant=use_reentrant)
    found = found.detach().requires_grad_() if net.is_odd else found
    return net.one(found), checkpoint(net.other, found, use_reentrant=use_reentrant)


def detached_inside_checkpoints(net: Net, states: torch.Tensor, *, use_reentrant: bool) -> Found:
    def head(found: torch.Tensor) -> torch.Tensor:
        one = net.one(found)
        return net.one(one.detach() if net.is_odd else one)

    found = hidden(net, states)
    return checkpoint(head, found, use_reentrant=use_reentrant), net.other(found)


def differentiated_inside(net: Net, states: torch.Tensor) -> Found:
    with torch.enable_grad():
        found = net.body(states.detach().requires_grad_())
        (slope,) = torch.autograd.grad(found.square().sum(), [found])
    one, other = plainly(net, states + slope)
    return one.detach() if net.is_odd else one, other


#: What leaves out something; calls are the same.
INSIDE: dict[str, Callable[[Net, torch.Tensor], Found]] = {
    **{
        each: FORWARDS[each] for each in ("alike", "body detached", "head detached", "other branch")
    },
    "states with gradient": FORWARDS["states with gradient"],
    "one result detached": one_result_detached,
    "heads detached": heads_detached,
    "heads of nothing": heads_of_nothing,
    "one head for both": one_head_for_both,
    "times zero": times_zero,
    "checkpointed": functools.partial(detached_in_checkpoints, use_reentrant=False),
    "checkpointed reentrantly": functools.partial(detached_in_checkpoints, use_reentrant=True),
    "inside checkpointed": functools.partial(detached_inside_checkpoints, use_reentrant=False),
    "inside checkpointed reentrantly": functools.partial(
        detached_inside_checkpoints, use_reentrant=True
    ),
    "differentiated inside": differentiated_inside,
}
PLACES: dict[str, tuple[str, ...]] = {
    "first": ("first",), "second": ("second",), "both": ("first", "second")
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What modules do otherwise for the examples of one rank.

    Attributes:
        model: how it is made.
        forward: see ``INSIDE``.
        place: which of the modules.
        moment: in which microbatches or steps.
        is_checkpointed: whether the pipeline computes the modules again in backward passes.
    """

    model: str
    forward: str
    place: str
    moment: str
    is_checkpointed: bool
    passes: str = "alike"
    is_outside: bool = False


def cases(model: str) -> list[Case]:
    """Returns the population of one kind of models."""
    return [
        Case(model, *rest)
        for rest in itertools.product(INSIDE, PLACES, MOMENTS, (False, True))
        if rest[0] != "alike"
    ]


class Odd:
    """A module as ranks see it of which one does otherwise; it keeps no state between calls."""

    is_odd = True

    def __init__(self, net: Net) -> None:
        self.body, self.norm, self.one, self.other = net.body, net.norm, net.one, net.other


class Deciding(Net):
    """Does otherwise by the numbers that it is given: a pipeline calls it as one."""

    def forward(self, states: torch.Tensor, marks: torch.Tensor) -> Found:  # type: ignore[override]
        return self.way(Odd(self) if marks.sum() > 0 else self, states)


class Two(nn.Module):
    """One module a partition; the last column of what comes in marks examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Deciding(), Deciding()

    def forward(self, given: torch.Tensor) -> Found:
        states, marks = given[:, :-1], given[:, -1]
        one, other = self.first(states, marks)
        found: Found = self.second(one + other.sum(-1, keepdim=True), marks)
        return found


class Pipelined(Training):
    """A split pipeline and plain PyTorch beside it."""

    case: Case  # type: ignore[assignment]

    def made(self) -> Two:  # type: ignore[override]
        return Two()

    def split(self) -> smp.DistributedModel:
        model = super().split()
        if self.case.is_checkpointed:
            for name in PLACES["both"]:
                smp.set_activation_checkpointing(model.get_module().get_submodule(name))
        return model

    def states(self, step: int) -> torch.Tensor:
        marks = torch.zeros(2, MICROBATCHES, 2, 1)
        for microbatch in range(MICROBATCHES):
            marks[1, microbatch] = MOMENTS[self.case.moment](step, microbatch)
        return torch.cat([super().states(step), marks.view(-1, 1)], dim=-1)

    def one_microbatch(self, states: torch.Tensor) -> None:
        self._choose(self.model.get_module())
        self.model.backward(both(self.model(states)))

    def expected(self, step: int, states: torch.Tensor) -> None:
        self.plain.zero_grad()
        self._choose(self.plain)
        parts = states.chunk(smp.dp_size() * MICROBATCHES)
        for each in parts:
            (both(self.plain(each)) / len(parts)).backward()

    def _choose(self, net: nn.Module) -> None:
        for name in PLACES["both"]:
            is_here = name in PLACES[self.case.place]
            net.get_submodule(name).way = INSIDE[self.case.forward] if is_here else plainly


def population(model: str, first: int, stride: int) -> dict[str, int]:
    """Tries cases; returns how often all ranks came to which end."""
    return population_of(Pipelined, cases(model), first, stride)
