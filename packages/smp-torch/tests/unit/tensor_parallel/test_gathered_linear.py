from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import (
    Together,
    sliced_linear,
)

SHARE = 0.5
GROUP: Any = SimpleNamespace(share_of_gradient=SHARE)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    shapes = [(5, 4), (3, 4), (3,)]
    found = [torch.randn(shape, dtype=dtype, generator=numbers) for shape in shapes]
    return [each.requires_grad_() for each in found]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("together", [False, True])
def test_gradients_of_a_slice_are_those_of_a_linear_map(dtype: torch.dtype, together: bool) -> None:
    """Of complex numbers, too; those of weights count for the share of one rank."""
    x, weight, bias = given = tensors(dtype)
    kept = Together() if together else None
    results = [sliced_linear(GROUP, each, weight, bias, kept) for each in (x, 2 * x)]
    found = torch.autograd.grad(sum(each.abs().square().sum() for each in results), given)
    whole = sum(F.linear(each, weight, bias).abs().square().sum() for each in (x, 2 * x))
    for each, wanted, share in zip(
        found, torch.autograd.grad(whole, given), (1, SHARE, SHARE), strict=True
    ):
        torch.testing.assert_close(each, wanted * share)


def test_a_slice_takes_a_vector() -> None:
    x, weight, bias = given = tensors(torch.float64)
    results = [
        function(x[0], weight, bias) for function in (partial(sliced_linear, GROUP), F.linear)
    ]
    found, wanted = (torch.autograd.grad(each.square().sum(), given) for each in results)
    for each, whole, share in zip(found, wanted, (1, SHARE, SHARE), strict=True):
        torch.testing.assert_close(each, whole * share)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_of_inputs_can_be_differentiated(dtype: torch.dtype) -> None:
    """A weight counts for the share of one rank in each product that it is part of."""
    x, weight, bias = given = tensors(dtype)

    def penalty(out: torch.Tensor) -> torch.Tensor:
        loss = out.abs().pow(3).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (again,) = torch.autograd.grad(slope.abs().pow(3).sum(), x, create_graph=True)
        return again.abs().square().sum()

    found = torch.autograd.grad(penalty(sliced_linear(GROUP, x, weight, bias)), given)
    wanted = torch.autograd.grad(penalty(F.linear(x, weight, bias)), given)
    for each, whole, share in zip(found, wanted, (1, SHARE, SHARE), strict=True):
        torch.testing.assert_close(each, whole * share)


@pytest.mark.parametrize("number", [1, 2])
def test_gradients_of_slices_that_can_be_differentiated_are_refused(number: int) -> None:
    """Of a split map each rank has the mean over all, and of others its own."""
    given = tensors(torch.float64)
    out = sliced_linear(GROUP, *given).square()
    (found,) = torch.autograd.grad(out.sum(), given[number], create_graph=True)
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        found.sum().backward()
