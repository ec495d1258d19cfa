"""Gradients of whatever a tape watches are those of TensorFlow."""

from __future__ import annotations

import pytest
import tf_gradients
from tf_beside import assert_same, with_library
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    "name",
    [
        "of_inputs",
        "without_tape",
        "of_others",
        "of_a_variable_given",
        "of_a_variable_in_the_call",
        "of_one_output",
    ],
)
def test_gradients_are_those_of_tensorflow(worlds: Worlds, name: str) -> None:
    assert_same(worlds, getattr(tf_gradients, name), world=TWO_BY_HAND)


@pytest.mark.parametrize("is_compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tape_around_the_step_sees_it(worlds: Worlds, is_compiled: bool) -> None:
    assert_same(worlds, tf_gradients.outside, is_compiled, world=TWO_BY_HAND)


def _refuse() -> None:
    tf_gradients.of_tangents(with_library())


def test_derivatives_that_go_forward_are_refused(worlds: Worlds) -> None:
    worlds.run(TWO_BY_HAND, _refuse)
