"""The survey's judge: what it takes for equal, and that it sees what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from trial import Failure, Record, Step
from verdict import Kind, judge


def record(names: tuple[str, ...], *, visits: list[int]) -> Record:
    training = Step(
        {"loss": [torch.tensor(2.0), torch.tensor(3.0)]},
        {name: torch.tensor([1.0, -2.0]) for name in names},
    )
    evaluation = Step({"loss": [torch.tensor(2.0), torch.tensor(3.0)]})
    return Record([training, evaluation], {}, len(names), visits)


REFERENCE = record(("first", "second"), visits=[])
RANKS = (record(("first",), visits=[0, 1]), record(("second",), visits=[0, 1]))


def test_equal_records_are_exact() -> None:
    assert judge(REFERENCE, RANKS).kind is Kind.EXACT
    assert judge(REFERENCE, RANKS).visits == (0, 1)


def differing_loss(ranks: tuple[Record, ...]) -> None:
    ranks[1].steps[0].results["loss"][1] *= 1 + 1e-5


def differing_evaluation(ranks: tuple[Record, ...]) -> None:
    ranks[0].steps[1].results["loss"][0] *= 1 + 1e-5


def differing_gradient(ranks: tuple[Record, ...]) -> None:
    gradient = ranks[1].steps[0].gradients["second"]
    assert gradient is not None
    gradient[0] += 1e-4


def missing_gradient(ranks: tuple[Record, ...]) -> None:
    ranks[1].steps[0].gradients["second"] = None


def parameter_on_no_rank(ranks: tuple[Record, ...]) -> None:
    del ranks[1].steps[0].gradients["second"]


def parameter_on_two_ranks(ranks: tuple[Record, ...]) -> None:
    ranks[1].steps[0].gradients["first"] = torch.tensor([1.0, -2.0])


def nan(ranks: tuple[Record, ...]) -> None:
    ranks[0].steps[0].results["loss"][0] *= float("nan")


def crash(ranks: tuple[Record, ...]) -> None:
    ranks[1].failure = Failure("crash", "KeyError: 3")


@pytest.mark.parametrize(
    "mistake",
    [
        differing_loss,
        differing_evaluation,
        differing_gradient,
        missing_gradient,
        parameter_on_no_rank,
        parameter_on_two_ranks,
        nan,
        crash,
    ],
)
def test_mistake_is_wrong(mistake: Callable[[tuple[Record, ...]], None]) -> None:
    ranks = copy.deepcopy(RANKS)
    mistake(ranks)
    verdict = judge(REFERENCE, ranks)
    assert verdict.kind is Kind.WRONG
    assert verdict.reason


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    reference, ranks = copy.deepcopy(REFERENCE), copy.deepcopy(RANKS)
    reference.steps[0].gradients["second"] = torch.tensor([1e-7, 0.0])
    ranks[1].steps[0].gradients["second"] = torch.tensor([0.0, -1e-7])
    assert judge(reference, ranks).kind is Kind.EXACT
    ranks[1].steps[0].gradients["second"] = torch.tensor([0.0, 1e-3])
    assert judge(reference, ranks).kind is Kind.WRONG


def test_cause_is_told_and_not_who_waited_for_it() -> None:
    ranks = copy.deepcopy(RANKS)
    ranks[0].failure = Failure("crash", "CommError: no answer from rank 1")
    ranks[1].failure = Failure("crash", "KeyError: 3")
    assert judge(REFERENCE, ranks).reason == "crash: KeyError: 3"


def test_refusal_and_absence_are_no_mistakes() -> None:
    ranks = copy.deepcopy(RANKS)
    for each in ranks:
        each.failure = Failure("refused", "UnsupportedError: why")
    assert judge(REFERENCE, ranks).kind is Kind.REFUSED
    assert judge(Record(failure=Failure("absent", "no such class")), ranks).kind is Kind.ABSENT


def test_comparison_without_a_split_proves_nothing() -> None:
    ranks = copy.deepcopy(RANKS)
    ranks[1].num_elements = 0
    assert judge(REFERENCE, ranks).kind is Kind.UNUSABLE
