"""Backward passes in the body of a step with one partition, whoever starts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward as backward_by_name
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import engine_replaced
from smdistributed.modelparallel.torch.stepping.loss_backward import SetGradients, stand_in


class Step:
    """A step of several microbatches, each of which counts a quarter."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.is_differentiating = False
        self.set_gradients = SetGradients(lambda: [("weight", weight)], is_part=True)
        self.passes = 0

    def scale_of_losses(self) -> float:
        return 0.25

    def differentiate(self, run: Callable[[], Any]) -> Any:
        self.set_gradients.check()
        self.passes += 1
        self.is_differentiating = True
        try:
            return run()
        finally:
            self.is_differentiating = False

    def start(self, tensors: Any, starts: Any) -> None:
        torch.autograd.backward(tensors, starts)


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.full((3,), 2.0))


@pytest.fixture
def step(weight: nn.Parameter) -> Iterator[Step]:
    made = Step(weight)
    with engine_replaced(stand_in(made)):
        yield made


@pytest.mark.parametrize(
    "run",
    [
        lambda loss, weight: loss.backward(),
        lambda loss, weight: torch.autograd.backward(loss),
        lambda loss, weight: backward_by_name([loss], inputs=[weight]),
        lambda loss, weight: loss.backward(torch.ones(())),
    ],
)
def test_gradients_count_by_the_share_of_the_microbatch(
    step: Step, weight: nn.Parameter, run: Callable[[Any, Any], None]
) -> None:
    run(weight.square().sum(), weight)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 3
    assert step.passes == 1


def test_passes_in_a_pass_count_once(step: Step, weight: nn.Parameter) -> None:
    checkpoint(torch.square, weight, use_reentrant=True).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 3
    assert step.passes == 1


def test_slopes_are_what_they_are(step: Step, weight: nn.Parameter) -> None:
    (slope,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
    assert slope.tolist() == [12.0] * 3
    slope.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 3
    assert step.passes == 1


@pytest.mark.parametrize(
    "put", [setattr, lambda weight, name, slope: getattr(weight, name).copy_(slope)]
)
def test_gradients_of_one_microbatch_are_not_set(
    step: Step, weight: nn.Parameter, put: Callable[..., None]
) -> None:
    weight.square().sum().backward()
    (slope,) = torch.autograd.grad(weight.square().sum(), weight)
    step.set_gradients.check()
    torch.autograd.grad(weight.square().sum(), weight)
    put(weight, "grad", slope)
    with pytest.raises(UnsupportedError, match=r"weight was set in a step .* model\.backward"):
        weight.square().sum().backward()


def test_a_graph_of_sums_is_refused(step: Step, weight: nn.Parameter) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad\(loss, parameters"):
        weight.square().sum().backward(create_graph=True)
    assert weight.grad is None
