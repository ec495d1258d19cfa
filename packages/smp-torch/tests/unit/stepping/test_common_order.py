"""Ranks that share sequences run one order of actions, that of the first of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.stepping import common_order
from smdistributed.modelparallel.torch.stepping.common_order import CommonOrder


class _Schedule:
    def __init__(self, text: str) -> None:
        self.digest = lambda: text


class _Plan:
    graph = SimpleNamespace(lines=lambda: ["a node"])


class _First:
    """The first of two ranks, as the other one sees it."""

    def __init__(self, schedule: _Schedule, structure: int | None) -> None:
        self._schedule, self._structure = schedule, structure

    def compare(self, numbers: list[int]) -> list[list[int]]:
        structure, _ = numbers
        crc = common_order.zlib.crc32(self._schedule.digest().encode())
        return [[self._structure or structure, crc], numbers]

    def from_first(self, obj: object, group: CommGroup) -> _Schedule:
        assert group is CommGroup.CP_GROUP
        return self._schedule


def order(
    monkeypatch: pytest.MonkeyPatch, own: _Schedule, first: _Schedule, structure: int | None = None
) -> Any:
    """Returns the schedule that a rank runs which would order its actions in a way of its own."""
    other = _First(first, structure)
    monkeypatch.setattr(common_order, "schedule_of", lambda runtime, plans: own)
    runtime: Any = SimpleNamespace(
        tensor_group=SimpleNamespace(size=1),
        context_group=SimpleNamespace(collectives=other),
        communicator=other,
    )
    return CommonOrder(runtime).of((_Plan(),))[1]  # type: ignore[arg-type]


def test_the_order_of_the_first_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own, first = _Schedule("0 1"), _Schedule("1 0")
    assert order(monkeypatch, own, first) is first
    assert order(monkeypatch, own, _Schedule("0 1")) is own  # nothing is sent


def test_ranks_that_compute_something_else_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = _Schedule("0 1")
    with pytest.raises(SMPError, match="have recorded different computations"):
        order(monkeypatch, schedule, schedule, structure=1)
