import numpy as np
import pytest
import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.tensors.contents import contents_kept
from smdistributed.modelparallel.torch.tensors.writes import (
    SMALL,
    arrays_as_they_are,
    large_arrays_copied,
    writes_of,
)


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.data.add_(1),
        lambda tensor: np.add(tensor.numpy(), 1, out=tensor.numpy()),
        lambda tensor: np.from_dlpack(tensor).fill(2),
        lambda tensor: torch.from_dlpack(tensor).add_(1),
        lambda tensor: tensor.set_(torch.ones(3)),
    ],
    ids=["data", "numpy", "dlpack", "torch dlpack", "memory"],
)
def test_whatever_way_numbers_change_they_are_put_back_and_counted(write) -> None:  # type: ignore[no-untyped-def]
    written, read = torch.zeros(SMALL + 1), torch.full((2,), float("nan"))
    before = [writes_of(each) for each in (written, read)]
    with contents_kept([written, read], "somebody writes to a tensor of layout {}"):
        write(written)
    assert torch.equal(written, torch.zeros(SMALL + 1))
    assert [writes_of(each) != was for each, was in zip((written, read), before, strict=True)] == [
        True,
        False,
    ]


def test_tensors_on_no_device_have_no_numbers() -> None:
    with contents_kept([torch.zeros(2, device="meta")], "somebody writes"):
        pass


def test_what_cannot_be_put_back_is_refused() -> None:
    sparse = torch.eye(2).to_sparse()
    with (
        pytest.raises(UnsupportedError, match=r"layout torch.sparse_coo, and that cannot be put"),
        contents_kept([sparse], "somebody writes to a tensor of layout {}"),
    ):
        sparse.mul_(2)


@pytest.mark.parametrize(
    "see", [lambda each: each.numpy(), np.from_dlpack], ids=["numpy", "dlpack"]
)
def test_a_small_part_of_large_memory_is_copied_for_others_too(see) -> None:  # type: ignore[no-untyped-def]
    large = torch.zeros(SMALL + 1)
    before = writes_of(large)
    with large_arrays_copied():
        see(large[:2]).fill(1)
        assert torch.equal(large, torch.zeros(SMALL + 1))
        with arrays_as_they_are():
            see(large[:2]).fill(1)
    assert large.sum() == 2
    assert writes_of(large) != before
