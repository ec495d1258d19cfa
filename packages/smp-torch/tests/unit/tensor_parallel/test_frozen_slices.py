"""A slice that was frozen in a product is so where that is differentiated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import _apply


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_penalty_counts_for_a_weight_that_its_product_did(is_frozen: bool) -> None:
    weight, x = nn.Parameter(torch.ones(3, 2)), torch.ones(4, 2, requires_grad=True)
    weight.requires_grad_(not is_frozen)
    out = _apply(x, weight, None, None, 0.5)
    weight.requires_grad_(True)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(gradient.square().sum(), weight, allow_unused=True)
    assert (found is None) == is_frozen
