from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from smdistributed.modelparallel.torch.compat.private.jagged import is_jagged, with_values

ROWS = [torch.randn(length, 4) for length in (2, 1, 3)]


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor(ROWS, layout=torch.jagged, requires_grad=True)


def with_gaps() -> torch.Tensor:
    starts, lengths = torch.tensor([0, 1, 0]), torch.tensor([2, 1, 3])
    return torch.nested.narrow(torch.randn(3, 4, 4), 1, starts, lengths, layout=torch.jagged)


def test_what_is_done_to_rows_is_done_to_all() -> None:
    nested = jagged()
    assert is_jagged(nested)
    weight = torch.randn(5, 4)
    made = with_values(nested, F.linear(nested.values(), weight))
    for one, other in zip(made.unbind(), F.linear(nested, weight).unbind(), strict=True):
        torch.testing.assert_close(one, other)
    padded = torch.nested.to_padded_tensor(made, 0.0)
    assert torch.equal(padded, torch.nested.to_padded_tensor(F.linear(nested, weight), 0.0))
    # Its lengths are known to be those of the other one.
    assert (made[..., :4] * nested).shape[1] == nested.shape[1]


def test_gradients_come_to_it() -> None:
    nested = jagged()
    with_values(nested, nested.values() * 2).values().sum().backward()
    assert nested.grad is not None
    assert torch.equal(nested.grad.values(), torch.full((6, 4), 2.0))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nested.nested_tensor(ROWS, layout=torch.jagged).transpose(1, 2),
        with_gaps(),
        torch.ones(2, 3),
    ],
)
def test_other_tensors_are_not(tensor: torch.Tensor) -> None:
    assert not is_jagged(tensor)
