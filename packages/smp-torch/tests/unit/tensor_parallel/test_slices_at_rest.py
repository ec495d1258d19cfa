"""Slices between steps, in one process, which has one of two ranks that are alike."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.collectives.alike import AsIfAlike
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import SliceSlot
from smdistributed.modelparallel.torch.tensor_parallel.slices_at_rest import (
    SliceAtRest,
    SlicesAtRest,
)

SHAPE = (3, 4)


class Resting:
    """A model of one parameter, half of which this rank has, and the other rank the same numbers.

    Attributes:
        parameter: of the model.
        slices: those of the model.
    """

    def __init__(self) -> None:
        module = nn.Module()
        self.parameter = nn.Parameter(torch.arange(1.0, 7.0).view(3, 2))
        self.parameter.grad = torch.full((3, 2), 2.0)
        module.weight = self.parameter
        parts = tuple(Rectangle.whole(SHAPE).cut(1, 2, rank) for rank in range(2))
        self._slots = [(self.parameter, SliceSlot(module, "weight", "part.weight", SHAPE, parts))]
        self._is_in_step = False
        self.slices = SlicesAtRest(TensorGroup(AsIfAlike(2, 0)), lambda: not self._is_in_step)
        self.rest()

    def rest(self) -> None:
        self.slices.rest(self._slots)

    def step(self) -> None:
        """Begins a step, in which something else has the parameter."""
        self._is_in_step = True

    def slice_here(self) -> torch.Tensor:
        """Returns what this rank has."""
        return self.parameter.as_subclass(torch.Tensor).detach()


def whole() -> nn.Parameter:
    parameter = nn.Parameter(torch.cat([torch.arange(1.0, 7.0).view(3, 2)] * 2, 1))
    parameter.grad = torch.full(SHAPE, 2.0)
    return parameter


def script(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@script
def summed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sin().sum()


def cubed_gradient(leaf: Any) -> Any:
    """Returns what autograd adds to a leaf, and gives of it."""
    leaf.pow(3).sum().backward()
    return leaf.grad * torch.autograd.grad(leaf.pow(3).sum(), leaf)[0]


READS: dict[str, Callable[[Any], Any]] = {
    "script": summed,
    "vmap": lambda each: torch.func.vmap(torch.sum)(each),
    "grad": lambda each: torch.func.grad(lambda one: (one**3).sum())(each),
    "past functions": lambda each: torch.Tensor._make_subclass(torch.Tensor, each).norm(),
    "numpy": lambda each: torch.as_tensor(each.detach().numpy().sum()),
    "mean": lambda each: each.sum() / each.numel(),
    "rows": lambda each: each.view(each.shape[0], -1).norm(dim=1),
    "of a gradient": lambda each: each.grad.norm(),
    "of a copy": lambda each: copy.copy(each).norm() + copy.deepcopy(each).norm(),
    "in a list": lambda each: torch._foreach_norm([each.detach(), each.grad])[0],
    "parameter": lambda each: nn.Parameter(each).sum(),
    "pickled": lambda each: pickle.loads(pickle.dumps(each)).sum(),
    "a view as a leaf": lambda each: cubed_gradient(each.detach().requires_grad_()),
    "a row as a leaf": lambda each: cubed_gradient(each.detach()[0].requires_grad_()),
    "data as a parameter": lambda each: cubed_gradient(nn.Parameter(each.data)),
    "by jacobian": lambda each: torch.autograd.functional.jacobian(torch.sin, each),
    "differentiated": lambda each: torch.autograd.grad(each.pow(3).sum(), each)[0] * 1,
}


@pytest.mark.parametrize("road", READS)
def test_what_reads_gets_the_whole(road: str) -> None:
    resting = Resting()
    found, wanted = READS[road](resting.parameter), READS[road](whole())
    torch.testing.assert_close(found.detach(), wanted.detach())


WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda each: each.data[0].zero_(),
    "column": lambda each: each.data[:, ::2].mul_(3),
    "by norms": lambda each: each.data.div_(each.norm(dim=1, keepdim=True)),
    "view": lambda each: each.detach().view(-1)[5:].fill_(7),
    "data": lambda each: setattr(each, "data", each.detach() * 3),
    "gradient": lambda each: setattr(each, "grad", each.grad * each.detach()),
    "foreach": lambda each: torch._foreach_mul_([each.grad], 3.0),
    "penalty": lambda each: each.pow(3).sum().backward(),
    "update": lambda each: torch.optim.AdamW([each], lr=0.1).step(),
}


@pytest.mark.parametrize("road", WRITES)
def test_what_is_written_to_the_whole_comes_to_the_slice(road: str) -> None:
    resting, plain = Resting(), whole()
    for each in (resting.parameter, plain):
        WRITES[road](each)
    resting.slices.wake()
    for found, wanted in (
        (resting.parameter, plain),
        (resting.parameter.grad, plain.grad),
    ):
        assert found is not None
        assert wanted is not None
        assert not isinstance(found, SliceAtRest)
        torch.testing.assert_close(found.detach(), wanted.detach()[:, :2])


REFUSED: dict[str, Callable[[Any], Any]] = {
    "pointer": lambda each: each.data_ptr(),
    "storage": lambda each: each.untyped_storage(),
    "gradient with a graph": lambda each: torch.autograd.grad(
        each.pow(3).sum(), each, create_graph=True
    ),
    "memory of another": lambda each: setattr(each, "data", torch.zeros(2, *SHAPE)[0]),
}


@pytest.mark.parametrize("road", REFUSED)
def test_what_would_see_a_whole_that_goes_is_refused(road: str) -> None:
    resting = Resting()
    with pytest.raises(UnsupportedError, match=r"each tensor-parallel rank has a slice"):
        REFUSED[road](resting.parameter)
    torch.testing.assert_close(resting.slice_here(), torch.arange(1.0, 7.0).view(3, 2))


def test_a_step_has_no_whole_tensors() -> None:
    resting = Resting()
    kept = resting.parameter.detach()
    resting.step()
    with pytest.raises(UnsupportedError, match=r"norm asks for part\.weight"):
        kept.norm()


def test_what_a_script_has_in_hand_rests_again() -> None:
    resting = Resting()
    gradient, view = resting.parameter.grad, resting.parameter.data
    assert gradient is not None
    assert resting.slices.wake()
    assert not resting.slices.wake()
    with torch.no_grad():
        resting.parameter.add_(1)
    resting.parameter.grad = None
    resting.rest()
    assert gradient.shape == SHAPE
    torch.testing.assert_close(view.sum(), whole().sum().detach() + 12)


def test_it_wakes_as_it_was() -> None:
    parameter = (resting := Resting()).parameter
    assert isinstance(parameter, nn.Parameter)
    assert parameter.grad is parameter.grad
    version = parameter._version
    resting.slices.wake()
    assert type(parameter) is nn.Parameter
    assert type(parameter.grad) is torch.Tensor
    assert parameter._version == version
    torch.testing.assert_close(parameter.detach(), torch.arange(1.0, 7.0).view(3, 2))


def test_a_copy_of_a_module_runs_on_slices() -> None:
    copied: Any = copy.deepcopy(Resting().parameter)
    with copied.awake():
        assert copied.shape == (3, 2)
        copied.data.mul_(2)
    torch.testing.assert_close(copied.sum(), 2 * whole().sum())
