from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from smdistributed.modelparallel.torch.stepping.output import StepOutput
from smdistributed.modelparallel.torch.stepping.results import combine

WEIGHTS = (0.75, 0.25)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Out:
    loss: Any
    extra: Any = None


def tensors(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(float(value), requires_grad=True) for value in values]


def items(output: Any) -> list[float]:
    assert isinstance(output, StepOutput)
    return [each.item() for each in output.outputs]


def test_tensors_become_step_outputs_in_order() -> None:
    result = combine(tensors(1, 2, 3), (0.5, 0.25, 0.25), detach=True)
    assert items(result) == [1, 2, 3]
    assert result.reduce_mean().item() == 1.75


@pytest.mark.parametrize("detach", [True, False])
def test_detach(detach: bool) -> None:
    result = combine(tensors(1, 2), WEIGHTS, detach=detach)
    assert [each.requires_grad for each in result.outputs] == [not detach] * 2


@pytest.mark.parametrize(
    "make", [lambda t: [t, None], lambda t: (t, None), lambda t: Point(t, None)]
)
def test_sequences_keep_their_class(make: Any) -> None:
    results = [make(each) for each in tensors(1, 2)]
    result = combine(results, WEIGHTS, detach=True)
    assert type(result) is type(results[0])
    assert items(result[0]) == [1, 2]
    assert result[1] is None


def test_mappings_and_dataclasses() -> None:
    result = combine([Out({"a": each}) for each in tensors(1, 2)], WEIGHTS, detach=True)
    assert isinstance(result, Out)
    assert items(result.loss["a"]) == [1, 2]
    assert result.extra is None


def test_numbers_become_lists() -> None:
    assert combine([1, 2], WEIGHTS, detach=True) == [1, 2]
    assert combine([(1.5, "x"), (2.5, "x")], WEIGHTS, detach=True) == ([1.5, 2.5], "x")


def test_what_differs_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"the result\[1\].*differs"):
        assert combine([(None, "a"), (None, "b")], WEIGHTS, detach=True) == (None, "a")


def test_a_bool_is_no_number() -> None:
    assert combine([True, True], WEIGHTS, detach=True) is True
