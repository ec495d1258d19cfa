"""An update by a list of variables trains as in Keras, or is refused; it never trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tf_beside import compare
from tf_early import ALL, MOMENTS, PLACES, USES, Case, outcomes
from tf_worlds import PLAIN, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

_FEW = [Case("model", "before", "trainable_variables", "copy", use) for use in USES]
_FEW += [Case("layer", "after", "weights", "itself", "lists")]


def _check(worlds: Worlds, cases: Sequence[Case]) -> None:
    (expected,) = worlds.run(PLAIN, outcomes, True, cases, timeout=300)
    found = worlds.run(TWO_BY_HAND, outcomes, False, cases, timeout=300)
    for case, wanted, ranks in zip(cases, expected, zip(*found, strict=True), strict=True):
        if any(isinstance(each, str) for each in ranks):
            print(case, "refused:", *ranks, "| Keras:", wanted if isinstance(wanted, str) else "")
        else:
            assert not isinstance(wanted, str), (case, wanted)
            compare(ranks, wanted, 1e-5)


def test_few_lists(worlds: Worlds) -> None:
    _check(worlds, _FEW)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_lists_of_all_moments(worlds: Worlds, place: str, moment: str) -> None:
    _check(worlds, [each for each in ALL if (each.place, each.moment) == (place, moment)])
