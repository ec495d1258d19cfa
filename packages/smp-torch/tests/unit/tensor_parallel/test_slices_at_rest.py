"""Slices between steps, in one process: what works number by number has them, nothing else does."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import SliceReadError
from smdistributed.modelparallel.torch.tensor_parallel.slices_at_rest import (
    SliceAtRest,
    rest,
    wake,
)


def slice_at_rest() -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(1.0, 7.0).view(3, 2))
    parameter.grad = torch.full((3, 2), 2.0)
    rest([(parameter, "part.weight")])
    return parameter


def script(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@script
def summed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sin().sum()


@script
def gradient_summed(tensor: torch.Tensor) -> torch.Tensor:
    gradient = tensor.grad
    return tensor.new_zeros(()) if gradient is None else gradient.sum()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "script": summed,
    "script of the gradient": gradient_summed,
    "vmap": lambda each: torch.func.vmap(torch.sum)(each),
    "grad": lambda each: torch.func.grad(lambda one: (one**3).sum())(each),
    "past functions": lambda each: torch.Tensor._make_subclass(torch.Tensor, each).norm(),
    "pointer": lambda each: each.data_ptr(),
    "storage": lambda each: each.untyped_storage(),
    "numpy": lambda each: each.detach().numpy(),
    "as another class, by torch": lambda each: torch.Tensor.as_subclass(each, torch.Tensor).sum(),
    "mean": lambda each: each.mean(),
    "of a gradient": lambda each: each.grad.norm(),
    "of a copy": lambda each: copy.copy(each).norm(),
    "written in a list": lambda each: _added(each)[0].norm(),
}


def _added(each: Any) -> list[torch.Tensor]:
    totals = [torch.zeros(3, 2)]
    torch._foreach_add_(totals, [each.detach()])
    return totals


@pytest.mark.parametrize("road", REFUSED)
def test_what_reads_the_whole_is_refused(road: str) -> None:
    with pytest.raises((SliceReadError, RuntimeError), match=r"SliceReadError|part\.weight"):
        REFUSED[road](slice_at_rest())


NUMBER_BY_NUMBER: dict[str, Callable[[Any], Any]] = {
    "product": lambda each: each.detach() * 3 + each.grad,
    "copy": copy.deepcopy,
    "vmap": lambda each: torch.func.vmap(torch.sin)(each),
    "parameter": nn.Parameter,
    "like": torch.zeros_like,
    "data": lambda each: each.data.clamp_(2, 3),
    "update": lambda each: torch.optim.AdamW([each], lr=0.1).step() or each,
}


@pytest.mark.parametrize("use", NUMBER_BY_NUMBER)
def test_what_works_number_by_number_is_exact(use: str) -> None:
    parameter = slice_at_rest()
    result = NUMBER_BY_NUMBER[use](parameter)
    plain = slice_at_rest()
    wake([plain])
    assert isinstance(result, SliceAtRest)
    torch.testing.assert_close(
        result.as_subclass(torch.Tensor), NUMBER_BY_NUMBER[use](plain).detach()
    )
    wake([parameter])
    torch.testing.assert_close(parameter, plain)


def test_what_other_tensors_of_a_list_are_stays() -> None:
    parameter, whole = slice_at_rest(), nn.Parameter(torch.ones(4))
    halves = torch._foreach_mul([parameter, whole], 0.5)
    assert [type(each) for each in halves] == [SliceAtRest, torch.Tensor]


def test_it_wakes_as_it_was() -> None:
    parameter = slice_at_rest()
    assert isinstance(parameter, nn.Parameter)
    assert parameter.grad is parameter.grad
    parameter.data = torch.zeros(3, 2)
    parameter.grad = torch.ones(3, 2)
    assert type(pickle.loads(pickle.dumps(parameter))) is nn.Parameter
    wake([parameter])
    assert type(parameter) is nn.Parameter
    assert type(parameter.grad) is torch.Tensor
    assert float(parameter.detach().sum() + parameter.grad.sum()) == 6
