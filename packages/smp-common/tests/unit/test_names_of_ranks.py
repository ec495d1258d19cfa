"""How messages name ranks."""

from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.names_of_ranks import have, listed


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ((2,), "rank 2 has ended"),
        ((2, 3), "ranks 2-3 have ended"),
        ((0, 1, 2, 5), "ranks 0-2, 5 have ended"),
    ],
)
def test_names_and_verbs_agree(ranks: tuple[int, ...], sentence: str) -> None:
    assert f"{listed(ranks)} {have(ranks)} ended" == sentence
