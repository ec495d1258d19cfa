"""A model is for Keras what it is without the library, or says what it is not."""

from __future__ import annotations

import pytest
import tf_keras_user
from tf_beside import assert_same, with_library
from tf_worlds import TWO_BY_HAND

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

FEW = {"by name", "a dict", ("first", "watching"), ("one", "no tape")}


def _marks(case: object) -> tuple[pytest.MarkDecorator, ...]:
    return () if case in FEW else (pytest.mark.slow,)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=_marks(each)) for each in tf_keras_user.CALLS]
)
def test_a_wrapped_model_is_called_as_it_is_written(worlds: Worlds, name: str) -> None:
    assert_same(worlds, tf_keras_user.called, name, world=TWO_BY_HAND)


@pytest.mark.parametrize(
    ("part", "way"), [pytest.param(*each, marks=_marks(each)) for each in tf_keras_user.WATCHED]
)
def test_gradients_of_some_variables(worlds: Worlds, part: str, way: str) -> None:
    assert_same(worlds, tf_keras_user.watched, part, way, world=TWO_BY_HAND)


def test_weights_are_variables(worlds: Worlds) -> None:
    assert_same(worlds, tf_keras_user.weights_by_name, world=TWO_BY_HAND)


def _refuse(name: str) -> None:
    use, reason = tf_keras_user.REFUSED[name]
    with pytest.raises(Exception, match=reason):
        use(with_library())


@pytest.mark.parametrize("name", tf_keras_user.REFUSED)
def test_what_keras_would_do_otherwise_is_refused(worlds: Worlds, name: str) -> None:
    worlds.run(TWO_BY_HAND, _refuse, name)
