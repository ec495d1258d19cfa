"""Buckets hold every gradient once, in an order that sizes and types decide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.gradients.buckets import make_buckets
from smdistributed.modelparallel.torch.gradients.data_parallel import DataParallelOptions


def test_last_parameters_come_first() -> None:
    parameters = [nn.Parameter(torch.rand(8)) for _ in range(5)]
    buckets = make_buckets(parameters, 64)
    held = [[each for each, _ in bucket.slots] for bucket in buckets]
    assert [len(each) for each in held] == [1, 2, 2]
    assert held[0][0] is parameters[4]
    assert {id(each) for part in held for each in part} == {id(each) for each in parameters}
    assert [bucket.handle.index() for bucket in buckets] == [0, 1, 2]
    assert [bucket.handle.is_last() for bucket in buckets] == [False, False, True]


def test_views_share_the_bucket() -> None:
    (bucket,) = make_buckets([nn.Parameter(torch.rand(2, 3)), nn.Parameter(torch.rand(3))], 10**6)
    for position, (parameter, view) in enumerate(bucket.slots):
        assert view.shape == parameter.shape
        view.fill_(position + 1)
    assert sorted(bucket.flat.tolist()) == [1.0] * 6 + [2.0] * 3


def test_views_of_complex_parameters_are_complex() -> None:
    parameters = [nn.Parameter(torch.rand(2, 3, dtype=torch.complex64)) for _ in range(2)]
    (bucket,) = make_buckets(parameters, 10**6)
    for position, (parameter, view) in enumerate(bucket.slots):
        assert (view.shape, view.dtype) == (parameter.shape, torch.complex64)
        view.fill_(complex(position + 1, 5))
    assert sorted(bucket.flat.tolist()) == [1.0] * 6 + [2.0] * 6 + [5.0] * 12


def test_types_do_not_mix_and_nothing_needs_no_bucket() -> None:
    parameters = [nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(2).double())]
    assert {bucket.flat.dtype for bucket in make_buckets(parameters, 10**6)} == {
        torch.float32,
        torch.float64,
    }
    assert make_buckets([], 10**6) == []


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("bucket_cap_mb", 0, ValueError), ("broadcast_buffers", None, TypeError)],
)
def test_options_are_checked(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        DataParallelOptions(**{name: value})
