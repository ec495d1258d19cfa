"""What optimizers keep is what they make when they are built, and takes no memory to find."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat.keras import (
    IS_KERAS_3,
    optimizer_variables,
    variable_of,
)
from smdistributed.modelparallel.tensorflow.planning.kept_state import kept_for, live_optimizers

O = tf.keras.optimizers  # noqa: E741
SHAPES = [(6, 50), (70,)]
KINDS: dict[str, Any] = {
    "sgd": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: O.Adam(amsgrad=True),
    "schedule": lambda: O.AdamW(O.schedules.CosineDecay(1e-3, 10)),
    "average": lambda: O.AdamW(use_ema=True),
    "factored": lambda: O.Adafactor(),
    "centered": lambda: O.RMSprop(centered=True, momentum=0.5),
    "lion": lambda: O.Lion(),
    "scaled": lambda: tf.keras.mixed_precision.LossScaleOptimizer(O.Adam()),
}
KERAS_3 = {"accumulating": lambda: O.Adam(gradient_accumulation_steps=4)}


def made_by(optimizer: Any, variables: list[Any]) -> float:
    known = {id(variable_of(each)) for each in optimizer_variables(optimizer)}
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner.build(variables)
    made = {id(each): each for each in map(variable_of, optimizer_variables(optimizer))}
    new = [each for key, each in made.items() if key not in known and each.shape.rank]
    return float(sum(each.dtype.size * each.shape.num_elements() for each in new))


@pytest.mark.parametrize("name", [*KINDS, *(KERAS_3 if IS_KERAS_3 else ())])
def test_what_is_kept_is_what_is_made(name: str) -> None:
    optimizer = {**KINDS, **KERAS_3}[name]()
    assert any(each is optimizer for each in live_optimizers())
    before = len(optimizer_variables(optimizer))
    found = [kept_for(optimizer, shape, "float32") for shape in SHAPES]
    assert len(optimizer_variables(optimizer)) == before
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    assert sum(each.num_bytes for each in found) == made_by(optimizer, variables)
    if IS_KERAS_3:
        # It reads the gradient, and changes the variable.
        assert all(each.moved_bytes >= 4 * 4 * 70 for each in found)
        assert all(0 < each.made_bytes <= 4 * 4 * 6 * 50 for each in found)


def test_what_another_optimizer_wraps_is_no_optimizer_of_its_own() -> None:
    inner = O.Adam()
    outer = tf.keras.mixed_precision.LossScaleOptimizer(inner)
    live = live_optimizers()
    assert any(each is outer for each in live)
    assert not any(each is inner for each in live)
