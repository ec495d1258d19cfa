"""What stands for a gradient that another rank has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.gradients.elsewhere import GradientElsewhere, StandIns


@pytest.fixture
def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.full((2, 3), 2.0))
    made.grad = GradientElsewhere.of(made, "head.weight", 1)
    return made


def test_it_says_what_it_is_like(parameter: Any) -> None:
    assert parameter.grad.shape == (2, 3)
    assert parameter.grad.dtype is torch.float32
    assert repr(parameter.grad) == "GradientElsewhere(head.weight, on rank 1)"


@pytest.mark.parametrize(
    "read",
    [
        lambda each: each.grad.norm(),
        lambda each: each.data.add_(each.grad, alpha=-0.1),
        lambda each: each.sub_(each.grad),
        lambda each: torch.nn.utils.clip_grad_norm_([each], 1.0),
        lambda each: torch.optim.SGD([each], lr=0.1).step(),
        lambda each: torch.optim.Adam([each], lr=0.1, foreach=True).step(),
        lambda each: torch.func.vmap(torch.sin)(each.grad),
        lambda each: torch._foreach_add_([each.grad], [each.grad]),
        lambda each: torch.ops.aten.sin.default(each.grad),
        lambda each: each.grad.tolist(),
    ],
)
def test_who_asks_for_numbers_is_told_who_has_them(
    parameter: nn.Parameter, read: Callable[[Any], Any]
) -> None:
    said = r"head\.weight, which with shard_optimizer_state rank 1 has .*DistributedOptimizer"
    with torch.no_grad(), pytest.raises(UnsupportedError, match=said):
        read(parameter)


def test_changes_are_left_to_the_owner(parameter: Any) -> None:
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 8.0)
    stands = parameter.grad
    assert stands.mul_(0.5) is stands
    stands.add_(parameter.detach(), alpha=0.1)
    nn.utils.clip_grad_value_([parameter, other], 4.0)
    torch._foreach_mul_([stands, other.grad], 0.5)
    assert other.grad.tolist() == [2.0, 2.0]
    optimizer = torch.optim.SGD([parameter, other], lr=1.0, foreach=True)
    optimizer.zero_grad(set_to_none=False)
    assert other.grad.tolist() == [0.0, 0.0]
    assert parameter.grad is stands


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_later_pass_adds_to_nothing(parameter: Any, create_graph: bool) -> None:
    parameter.square().sum().backward(create_graph=create_graph)
    assert type(parameter.grad) is torch.Tensor
    assert parameter.grad.detach().equal(torch.full((2, 3), 4.0))
    parameter.square().sum().backward()
    assert parameter.grad.detach().equal(torch.full((2, 3), 8.0))


def test_it_stands_as_long_as_a_gradient_would() -> None:
    stand_ins, parameter = StandIns(), nn.Parameter(torch.ones(2))
    stand_ins.put(parameter, "bias", 3, is_used=False)
    assert parameter.grad is None
    stand_ins.put(parameter, "bias", 3, is_used=True)
    assert re.search("bias, on rank 3", repr(parameter.grad))
    stand_ins.remove([parameter])
    assert parameter.grad is None
    stand_ins.put(parameter, "bias", 3, is_used=False)  # it had one before this step
    assert isinstance(parameter.grad, GradientElsewhere)
    parameter.grad = None
    stand_ins.remove([parameter])
    stand_ins.put(parameter, "bias", 3, is_used=False)
    assert parameter.grad is None
