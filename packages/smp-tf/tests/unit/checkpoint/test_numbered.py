"""Names of variables that differ by the numbers of layers without names alone."""

from __future__ import annotations

import pytest

from smdistributed.modelparallel.tensorflow.checkpoint.numbered import renumbered

_AUTOMATIC = {"net", "dense"}


def test_numbers_keep_their_order() -> None:
    saved = ["m/net/dense_9/kernel", "m/net/dense_10/kernel", "m/net/head/kernel"]
    own = ["m/net_1/dense_98/kernel", "m/net_1/dense_101/kernel", "m/net_1/head/kernel"]
    assert renumbered(own, saved, _AUTOMATIC) == dict(zip(own, saved, strict=True))


@pytest.mark.parametrize(
    "own",
    [
        pytest.param("m/net/dense/kernel", id="the same"),
        pytest.param("n/net_1/dense/kernel", id="another model"),
        pytest.param("m/net/head_1/kernel", id="a name of the user"),
        pytest.param("m/net_1/dense/bias", id="another variable"),
    ],
)
def test_other_differences_are_left(own: str) -> None:
    saved = "m/net/head/kernel" if "head" in own else "m/net/dense/kernel"
    assert renumbered([own], [saved], _AUTOMATIC) == {}
