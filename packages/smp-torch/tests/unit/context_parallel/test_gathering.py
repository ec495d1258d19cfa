"""Which calls are made for wholes that pieces are gathered to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smdistributed.modelparallel.torch.context_parallel.calls import taken_apart
from smdistributed.modelparallel.torch.context_parallel.gathering import gives_views, is_few

WHOLE = torch.Size([2, 16, 3])


def test_few_numbers_are_those_of_a_block() -> None:
    assert is_few([torch.Size([2, 4, 3])], [WHOLE.numel()], 2)
    assert not is_few([torch.Size([2, 5, 3])], [WHOLE.numel()], 2)
    assert is_few([torch.Size([])], [2, WHOLE.numel()], 2)
    assert not is_few([], [WHOLE.numel()], 2)  # its numbers become those of Python


@pytest.mark.parametrize(
    ("function", "shape", "views"),
    [
        (lambda x: x[:, 0], (2, 3), True),
        (lambda x: x.unbind(1)[0], (2, 3), True),
        (lambda x: x.amax(1), (2, 3), False),
        (lambda x: x[torch.arange(2, device="meta"), :1], (2, 1, 3), False),
        (lambda x: x[x > 0], (2,), None),  # data says how many these are
        (lambda x: x[:, 0], (2, 4), None),  # it was called in another way
    ],
)
def test_results_may_see_what_is_given(
    function: Any, shape: tuple[int, ...], views: bool | None
) -> None:
    spec, leaves, _ = taken_apart((torch.empty(WHOLE),), {})
    tensors = [(WHOLE, torch.float32)]
    assert gives_views(function, spec, leaves, tensors, [torch.Size(shape)]) is views
