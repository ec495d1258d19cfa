from __future__ import annotations

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
