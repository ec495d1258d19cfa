"""What users of Keras write gives the numbers of TensorFlow, or is refused with a reason."""

from __future__ import annotations

import pytest
import tf_tapes
import tf_users_fit
import tf_users_layers
import tf_users_python
import tf_users_training
from tf_beside import assert_same, with_library
from tf_worlds import TWO, TWO_BY_HAND

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

MODULES = (tf_users_layers, tf_users_python, tf_users_training, tf_users_fit, tf_tapes)
#: Each shows something that no other test has; the others are a population.
FEW = {
    *("lazy_variables", "effects_of_gradients", "stateful_recurrence", "constraints"),
    *("called_in_loops_and_branches", "penalty_at_examples"),
}
ALL = [(module, name) for module in MODULES for name in module.NAMES]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, id=name, marks=() if name in FEW else pytest.mark.slow)
        for module, name in ALL
    ],
)
def test_the_numbers_are_those_of_keras(worlds: Worlds, module: object, name: str) -> None:
    assert_same(worlds, getattr(module, name), world=TWO_BY_HAND)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [pytest.param(module, name, id=name) for module, name in ALL]
)
def test_they_are_also_where_the_library_cuts(worlds: Worlds, module: object, name: str) -> None:
    assert_same(worlds, getattr(module, name), world=TWO)


def _refuse(name: str, message: str) -> None:
    (module,) = (each for each in MODULES if hasattr(each, name))
    with pytest.raises(SMPError, match=message):
        getattr(module, name)(with_library())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gradients_of_features", "the gradient of one result of a call of the model by another"),
        ("called_in_a_function", "in a tf.function inside of a step function, which would be"),
        ("vectorized", "cannot be vectorized"),
        ("kept_by_the_call", "compute uses .*Tanh:0, which call kept elsewhere"),
        ("penalty_with_noise", "It draws random numbers"),
        ("penalty_with_dropout", "It draws random numbers"),
        ("gradients_by_weights_again", "what it is called with, .* received those of variables"),
        ("own_train_step", "in a train_step of your own, too, the part that computes"),
    ],
)
def test_what_is_not_computed_is_refused(worlds: Worlds, name: str, message: str) -> None:
    worlds.run(TWO_BY_HAND, _refuse, name, message)
