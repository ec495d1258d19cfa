"""Which calls are made for wholes that pieces are gathered to."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.context_parallel.actions import OfGathered
from smdistributed.modelparallel.torch.context_parallel.calls import Call, Hole, taken_apart
from smdistributed.modelparallel.torch.context_parallel.gathering import gives_views, is_few, of_few
from smdistributed.modelparallel.torch.context_parallel.layout import Layout

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


@pytest.mark.parametrize(
    ("function", "shape", "most", "is_gathered"),
    [
        (lambda x: x.softmax(1), WHOLE, WHOLE.numel(), True),
        (lambda x: x.softmax(1), WHOLE, WHOLE.numel() - 1, False),
        (lambda x: x[x > 0], (5,), WHOLE.numel(), True),  # data says how many these are
        (lambda x: x[x > 0], (5,), WHOLE.numel() - 1, False),
        (lambda x: x.amax(1), (2, 3), 0, True),
    ],
)
def test_what_is_no_larger_than_the_arguments_is_gathered(
    function: Any, shape: tuple[int, ...], most: int, is_gathered: bool
) -> None:
    spec, leaves, tensors = taken_apart((torch.empty(WHOLE),), {})
    shapes = tuple((each.shape, each.dtype) for each in tensors)
    call = Call(function, spec, tuple(leaves), (), shapes, (frozenset(),))
    found = of_few(call, [torch.Size(shape)], [Layout(1)], 2, most)
    assert (found is not None) is is_gathered


def test_what_changes_in_place_what_is_gathered_is_refused() -> None:
    group: Any = Mock(whole=lambda piece, size, layout: piece.clone())
    action = OfGathered((Hole(0), 1), (Layout(1),), (16,), False)
    spec, leaves, tensors = taken_apart((torch.ones(WHOLE), 1), {})
    with pytest.raises(UnsupportedError, match="changes what it is given in place"):
        action.run(group, torch.Tensor.cumsum_, spec, leaves, tensors)
    assert action.run(group, torch.cumsum, spec, leaves, tensors)[0, -1, 0] == 16
