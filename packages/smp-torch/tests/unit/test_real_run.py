"""What a module has written to while it ran on random numbers."""

from __future__ import annotations

import pytest
import torch

from smdistributed.modelparallel.torch.record.real_run import _is_equal

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [NAN, 1.0], False),
        ([INF], [torch.finfo().max], False),
        ([INF, -INF, NAN], [INF, -INF, NAN], True),
        ([1.0], [1.0, 1.0], False),
        ([], [], True),
        ([complex(NAN, 1)], [complex(NAN, 1)], True),
        ([True, False], [True, True], False),
        ([1, 2], [1, 3], False),
    ],
)
def test_numbers_are_compared_and_what_is_none(
    one: list[float], other: list[float], equal: bool
) -> None:
    assert _is_equal(torch.tensor(one), torch.tensor(other)) is equal
