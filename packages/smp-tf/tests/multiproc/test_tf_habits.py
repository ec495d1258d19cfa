"""Scripts as users of Keras write them, each another habit, give the numbers of one process."""

from __future__ import annotations

import pytest
import tf_habits_fit
import tf_habits_gradients
import tf_habits_layers
import tf_habits_loops
import tf_habits_losses
import tf_habits_networks
import tf_habits_updates
from tf_beside import assert_same
from tf_worlds import TWO, TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

MODULES = (
    *(tf_habits_gradients, tf_habits_updates, tf_habits_losses, tf_habits_loops),
    *(tf_habits_layers, tf_habits_networks, tf_habits_fit),
)
#: Losses apart, the norm of all, a process without variables.
FEW = {"conflicting_tasks", "optimizer_by_the_norm", "fit_backed_up"}


def _every() -> list[object]:
    return [
        pytest.param(module, name, id=name, marks=() if name in FEW else pytest.mark.slow)
        for module in MODULES
        for name in module.NAMES
    ]


@pytest.mark.parametrize(("module", "name"), _every())
def test_the_numbers_are_those_of_keras(worlds: Worlds, module: object, name: str) -> None:
    assert_same(worlds, getattr(module, name), world=TWO_BY_HAND, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), _every())
def test_they_are_also_where_the_library_cuts(worlds: Worlds, module: object, name: str) -> None:
    assert_same(worlds, getattr(module, name), world=TWO, tolerance=1e-4)
