from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.runtime.codec import TORCH_CODEC


def there_and_back(obj: Any) -> Any:
    return TORCH_CODEC.loads(TORCH_CODEC.dumps(obj))


def test_a_view_does_not_carry_its_storage() -> None:
    whole = torch.randn(1000, 100)
    data = TORCH_CODEC.dumps(whole[3:5])
    assert len(data) < 5000
    got = TORCH_CODEC.loads(data)
    assert torch.equal(got, whole[3:5])
    assert got.untyped_storage().nbytes() == got.nbytes


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("data", [torch.randn(4), torch.randn(100, 4)[2]], ids=["whole", "view"])
def test_parameters_stay_parameters(data: torch.Tensor, requires_grad: bool) -> None:
    got = there_and_back(nn.Parameter(data, requires_grad))
    assert type(got) is nn.Parameter
    assert got.requires_grad is requires_grad
    assert torch.equal(got, data)


# PyTorch 2.11 says so of every sparse tensor that it unpickles.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.empty(0, 5),
        torch.randn(4, 6).T,
        torch.randn(2, 3, dtype=torch.bfloat16),
        torch.tensor([True, False])[1:],
        torch.randn(6, 4)[::2, 1:3],
        torch.randn(3, requires_grad=True),
        torch.randn(8, requires_grad=True)[:2] * 2,
        torch.eye(3).to_sparse(),
    ],
    ids=str,
)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    got = there_and_back(tensor)
    assert got.dtype == tensor.dtype
    assert got.layout == tensor.layout
    assert got.requires_grad == tensor.requires_grad
    assert got.is_leaf
    assert torch.equal(got.to_dense(), tensor.detach().to_dense())


def test_meta_tensors_stay_without_data() -> None:
    got = there_and_back(torch.empty(3, 4, device="meta"))
    assert got.device.type == "meta"
    assert got.shape == (3, 4)


def test_tensors_in_containers_and_classes_of_containers() -> None:
    obj = collections.OrderedDict(a=[torch.ones(2)], b=(None, b"", "x"))
    got = there_and_back(obj)
    assert type(got) is collections.OrderedDict
    assert torch.equal(got["a"][0], torch.ones(2))
    assert got["b"] == (None, b"", "x")


def test_one_tensor_twice_stays_one() -> None:
    tensor = torch.randn(3)
    first, second = there_and_back([tensor, tensor])
    assert first is second
