"""A number of all weights or gradients is that of one process, wherever a script computes it."""

from __future__ import annotations

import pytest
import tf_wholes
from tf_beside import assert_same
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

#: Every way, gradients and weights, with variables missing and without. In graphs, which take
#: longest, are those of optimizers, and of losses.
FEW = {("one", "both", "outside"), ("none", "both", "optimizer"), ("one", "mean")}


def _marks(case: object) -> tuple[pytest.MarkDecorator, ...]:
    return () if case in FEW else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("kind", "what", "when"),
    [pytest.param(*each, id="-".join(each), marks=_marks(each)) for each in tf_wholes.ALL],
)
def test_numbers_are_those_of_all_partitions(
    worlds: Worlds, kind: str, what: str, when: str
) -> None:
    assert_same(worlds, tf_wholes.train, kind, what, when, world=TWO_BY_HAND)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=_marks((kind, name)))
        for kind in tf_wholes.KINDS
        for name in tf_wholes.PENALTIES
    ],
)
def test_gradients_go_through_them(worlds: Worlds, kind: str, name: str) -> None:
    assert_same(worlds, tf_wholes.penalized, kind, name, world=TWO_BY_HAND)


@pytest.mark.parametrize(
    ("what", "is_in_body"),
    [
        ("gradients", False),
        *(
            pytest.param(what, is_in_body, marks=pytest.mark.slow)
            for what, is_in_body in [("weights", False), ("gradients", True), ("weights", True)]
        ),
    ],
)
def test_numbers_of_some(worlds: Worlds, what: str, is_in_body: bool) -> None:
    assert_same(worlds, tf_wholes.of_some, what, is_in_body, world=TWO_BY_HAND)
