from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from smdistributed.modelparallel.torch.stepping.output import StepOutput


def test_reductions() -> None:
    output = StepOutput([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    assert output.reduce_mean().tolist() == [2, 4]
    assert output.reduce_sum().tolist() == [4, 8]
    assert output.concat().tolist() == output.merge().tolist() == [1, 2, 3, 6]
    assert output.stack().tolist() == [[1, 2], [3, 6]]
    assert [each.tolist() for each in output.outputs] == [[1, 2], [3, 6]]


def test_the_mean_counts_microbatches_by_their_sizes() -> None:
    output = StepOutput([torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])], [0.75, 0.25])
    assert output.reduce_mean().tolist() == [1.75, 3.5]
    assert output.detach().reduce_mean().tolist() == [1.75, 3.5]
    half = StepOutput([torch.tensor(256.0), torch.tensor(257.0)], [2 / 3, 1 / 3])
    wide = half.reduce_mean()
    narrow = StepOutput([each.half() for each in half.outputs], [2 / 3, 1 / 3]).reduce_mean()
    assert narrow.dtype == torch.float16
    assert narrow == wide.half()


def test_scalars() -> None:
    output = StepOutput([torch.tensor(1.0), torch.tensor(2.0)])
    assert output.reduce_mean().item() == 1.5
    assert output.stack().tolist() == [1, 2]
    with pytest.raises(ValueError, match="stack"):
        output.concat()


def test_integers_have_a_sum_but_no_mean() -> None:
    output = StepOutput([torch.tensor(1), torch.tensor(4)])
    assert output.reduce_sum().item() == 5
    with pytest.raises(TypeError, match="reduce_sum"):
        output.reduce_mean()


@pytest.mark.parametrize("method", ["reduce_mean", "reduce_sum", "stack"])
def test_different_shapes(method: str) -> None:
    output = StepOutput([torch.ones(2, 3), torch.ones(1, 3)])
    with pytest.raises(ValueError, match=rf"{method}.*\(2, 3\), \(1, 3\)"):
        getattr(output, method)()
    assert output.concat().shape == (3, 3)


def test_detach() -> None:
    output = StepOutput([torch.ones(1, requires_grad=True) * 2])
    assert output.outputs[0].requires_grad
    assert not output.detach().outputs[0].requires_grad


_LOSS = StepOutput([torch.tensor(1.0), torch.tensor(4.0)], [0.75, 0.25])
_MEAN = torch.tensor(1.75)


@pytest.mark.parametrize(
    "use",
    [
        float,
        abs,
        math.isnan,
        lambda x: x.item(),
        lambda x: f"{x:.4f} {x}",
        lambda x: "%.3f" % x,  # noqa: UP031
        lambda x: [x < 2, x <= 2, x > 2, x >= 2, x == 1.75, x != 1.75],
        lambda x: [x > 1, torch.tensor(2.0) > x, torch.tensor(1.75) == x],
        lambda x: [x + 1, 1 + x, x - 1, 1 - x, x * 2, 2 * x, x / 2, 2 / x, x**2, 2**x, -x],
        lambda x: [torch.ones(2) + x, x + torch.ones(2), torch.ones(2) / x, torch.ones(2) * x],
        lambda x: [x + x, x - x, x * x, x / x, x == x, x < x],
        lambda x: [sum([x, x]), min(x, 3.0) * 1, max([x, 1.0]) * 1],
        lambda x: operator.iadd(0.0, x),
        lambda x: operator.iadd(torch.zeros(()), x),
        lambda x: float(np.mean([float(x), x.item()])),
    ],
)
def test_scalars_are_used_as_the_number_that_they_are(use: Callable[[Any], Any]) -> None:
    assert str(use(_LOSS)) == str(use(_MEAN))


@pytest.mark.parametrize("outputs", [[torch.ones(2), torch.ones(1)], [torch.tensor(1)]])
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.item(),
        float,
        lambda x: x + 1,
        lambda x: 2.0 * x,
        lambda x: x < 3,
        lambda x: x > 3,
        lambda x: f"{x:.2f}",
        lambda x: torch.zeros(2) + x,
        lambda x: _LOSS + x,
    ],
)
def test_others_are_to_be_reduced_first(
    use: Callable[[Any], Any], outputs: list[torch.Tensor]
) -> None:
    with pytest.raises(TypeError, match=r"torch\.\w+ of shapes \[\(.*reduce_sum\(\) or concat\(\)"):
        use(StepOutput(outputs))


def test_what_is_no_number_stays_an_object() -> None:
    output, other = StepOutput([torch.ones(2)]), StepOutput([torch.ones(2)])
    assert output == output
    assert output != other
    assert output != _LOSS
    assert len({output, other, _LOSS}) == 3
    assert f"{output}" == repr(output)
