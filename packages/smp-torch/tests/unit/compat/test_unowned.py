"""Tensors at the place of others, which do not keep their memory."""

from __future__ import annotations

import pytest
import torch

from smdistributed.modelparallel.torch.compat.private.memory import unowned
from smdistributed.modelparallel.torch.compat.private.tensors import users_of_memory

WHOLE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        WHOLE,
        WHOLE.t(),
        WHOLE[1:, ::2],
        WHOLE[:, :0],
        WHOLE[2, 3],
        WHOLE > 3,
        WHOLE.to(torch.cfloat),
    ],
)
def test_it_is_the_same_but_for_who_keeps_it(tensor: torch.Tensor) -> None:
    before = users_of_memory(tensor)
    found = unowned(tensor)
    assert users_of_memory(tensor) == before
    assert (found.shape, found.stride(), found.dtype) == (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
    assert found.equal(tensor)
    if tensor.numel():
        assert found.data_ptr() == tensor.data_ptr()
