"""What a model is called with, its attributes, and tapes in it, count as they do in plain Keras."""

from __future__ import annotations

import pytest
import tf_calls
from tf_beside import assert_same
from tf_worlds import TWO, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


@pytest.mark.parametrize("name", ["arguments", "attributes", "tape_in_gradient", "tape_in_call"])
def test_the_numbers_are_those_of_keras(worlds: Worlds, name: str) -> None:
    assert_same(worlds, getattr(tf_calls, name), world=TWO_BY_HAND)


@pytest.mark.parametrize("world", [TWO_BY_HAND, TWO], ids=["by hand", "automatic"])
def test_what_is_computed_again_has_its_gradients(worlds: Worlds, world: World) -> None:
    assert_same(worlds, tf_calls.recompute, world=world)
