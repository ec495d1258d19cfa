"""A number of all weights or gradients is that of one process, wherever a script computes it."""

from __future__ import annotations

import pytest
import tf_wholes
from tf_beside import assert_same
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

#: Every way, gradients and weights, eagerly and in graphs, with variables missing and without.
FEW = {
    *(("several", "gradients", "body"), ("one", "both", "outside"), ("none", "both", "optimizer")),
    ("one", "mean"),
    *("some", "one is told", "gradients of a root", "a metric", "given to a function", "for each"),
}


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


#: Outside of the body, and in it; those of Python's numbers are outside alone.
_BODIES = ("some", "a difference", "parts", "clipped in a function", "for each")


@pytest.mark.parametrize("what", ["gradients", pytest.param("weights", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "is_in_body"),
    [
        *(pytest.param(name, False, marks=_marks(name)) for name in tf_wholes.OF_SOME),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in _BODIES),
    ],
)
def test_numbers_of_some_are_refused(
    worlds: Worlds, what: str, name: str, is_in_body: bool
) -> None:
    worlds.run(TWO_BY_HAND, tf_wholes.refused, what, name, is_in_body)


@pytest.mark.parametrize(
    "what", ["gradients", "weights", pytest.param("both", marks=pytest.mark.slow)]
)
def test_numbers_that_python_may_add_up_are_told_with_a_warning(worlds: Worlds, what: str) -> None:
    worlds.run(TWO_BY_HAND, tf_wholes.told, what)
