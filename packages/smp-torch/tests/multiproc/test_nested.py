"""Nested tensors in split models, in real processes: exact, or refused by an error that says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import own_share, run_plain
from torch import nn
from world import pipeline, run, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

LAYOUTS = (torch.strided, torch.jagged)


class Padded(nn.Module):
    """Takes rows of which some are shorter, and makes a nested tensor of them."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.layout = layout

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        rows = [states[0], states[1, :1]]
        nested = torch.nested.as_nested_tensor(rows, layout=self.layout)
        return torch.nested.to_padded_tensor(self.map(nested), 0.0)


def body(model: Any, states: torch.Tensor) -> torch.Tensor:
    loss = model(states).square().mean()
    model.backward(loss)
    return loss.detach()


def between(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Makes nested tensors of results in the body of the step."""
    found = model(states)
    nested = torch.nested.as_nested_tensor([found[0], found[1, :1]], layout=torch.jagged)
    loss = torch.nested.to_padded_tensor(nested * 2, 0.0).square().mean()
    model.backward(loss)
    return loss.detach()


def train(layout: torch.layout, body: Callable[..., Any]) -> None:
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(4, 4), Padded(layout), nn.Linear(4, 4))
    with smp.tensor_parallelism():
        model = smp.DistributedModel(copy.deepcopy(plain))
    states = torch.randn(8 * smp.dp_size(), 3, 4)
    got = smp.step(body)(model, *own_share([states], [0]))
    for one, other in zip(got.outputs, run_plain(plain, body, [states]), strict=True):
        torch.testing.assert_close(one, other)
    wanted = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad)


def in_modules() -> None:
    for layout in LAYOUTS:
        train(layout, body)


def between_modules() -> None:
    with pytest.raises(UnsupportedError, match=r"stand-ins of a recording.* Put it into a module"):
        train(torch.jagged, between)


def in_slices() -> None:
    train(torch.jagged, body)
    with pytest.raises(UnsupportedError, match=r"got a nested tensor.*smp\.set_tensor_parallelism"):
        train(torch.strided, body)


def test_in_modules_of_a_pipeline(worlds: Worlds) -> None:
    run(worlds, pipeline(2), in_modules)


def test_between_modules_of_a_pipeline(worlds: Worlds) -> None:
    run(worlds, pipeline(2), between_modules)


def test_in_modules_that_are_split(worlds: Worlds) -> None:
    config = {"tensor_parallel_degree": 2, "microbatches": 4, "ddp": True}
    run(worlds, world_of(2, config), in_slices)
