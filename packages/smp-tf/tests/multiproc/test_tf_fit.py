"""Keras's training loop gives the numbers that it gives without the library."""

from __future__ import annotations

import pytest
import tf_fit
from tf_beside import assert_same
from tf_worlds import ONE, TWO, TWO_BY_HAND, TWO_REPLICAS

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param("transfer", TWO_BY_HAND, id="transfer"),
        pytest.param("options", TWO_BY_HAND, id="options"),
        pytest.param("masked", TWO_BY_HAND, id="masked"),
        pytest.param(
            "masked_in_replicas", TWO_REPLICAS, id="masked in replicas", marks=pytest.mark.slow
        ),
        pytest.param("outputs", TWO, id="outputs"),
        pytest.param("outputs", ONE, id="outputs of one", marks=pytest.mark.slow),
    ],
)
def test_fit_gives_the_numbers_of_keras(worlds: Worlds, name: str, world: World) -> None:
    assert_same(worlds, getattr(tf_fit, name), world=world, tolerance=1e-4)
