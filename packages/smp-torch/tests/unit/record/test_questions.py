"""Questions about data: answered apart from the step, so that nothing is written."""

from __future__ import annotations

import pytest
import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.questions.question import Question


def question(function: object) -> Question:
    return Question(function, (), {}, "there", (), 0)  # type: ignore[arg-type]


def test_an_answer_has_shapes_and_plain_values() -> None:
    assert question(torch.equal)._ask(torch.ones(2), torch.ones(2)) is True
    answer = question(torch.nonzero)._ask(torch.tensor([0, 3, 1]))
    assert (answer.sizes, answer.dtype) == ((2, 1), torch.int64)


@pytest.mark.parametrize(
    ("function", "args", "out"),
    [
        (torch.nonzero, (torch.tensor([3, 1]),), torch.zeros(2, 1, dtype=torch.int64)),
        (torch.masked_select, (torch.ones(2), torch.tensor([True, False])), torch.zeros(1)),
    ],
)
def test_what_writes_besides_is_no_question(
    function: object, args: tuple[torch.Tensor, ...], out: torch.Tensor
) -> None:
    with pytest.raises(UnsupportedError, match="there gives what depends on data, and writes it"):
        question(function)._ask(*args, out=out)


def test_an_array_has_memory_of_its_own() -> None:
    """A module that stays whole writes to it twice else: when it is recorded, and in the step."""
    kept = torch.ones(2)
    array = question(torch.Tensor.numpy)._ask(kept)
    array += 1
    assert kept.tolist() == [1, 1]
