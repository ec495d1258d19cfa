"""Keras's training loop gives the numbers that it gives without the library."""

from __future__ import annotations

import pytest
import tf_fit
from tf_beside import assert_same
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


@pytest.mark.parametrize("name", ["transfer", "options", "outputs"])
def test_fit_gives_the_numbers_of_keras(worlds: Worlds, name: str) -> None:
    assert_same(worlds, getattr(tf_fit, name), world=TWO_BY_HAND, tolerance=1e-4)
