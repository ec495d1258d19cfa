"""Values of variables that one rank reads alone, see ``tf_beside``.

Every rank does so in turn, of all variables, wherever they live; the others are on their way to
what all do together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side
from tf_calls import rows
from tf_users import class_of_halves

#: What a rank reads of a model.
READS: dict[str, Callable[[Any], list[Any]]] = {
    "variables": lambda model: [each.numpy() for each in model.trainable_variables],
    "arrays": lambda model: [np.asarray(each) for each in model.variables],
    "weights": lambda model: model.get_weights(),
    "norms": lambda model: [float(tf.norm(each)) for each in model.trainable_variables],
    "computed": lambda model: [
        (
            tf.reduce_mean(tf.abs(each[0])) + tf.reduce_max(tf.stack([3.0 * each, 2.0 * each]))
        ).numpy()
        for each in model.trainable_variables
    ],
    "sums": lambda model: [
        float(sum(float(np.sum(np.square(each))) for each in model.trainable_variables))
    ],
}


def alone(side: Side, kind: str) -> Found:
    """One rank reads before and after what changes variables; all read in the end."""
    is_library = side.base is not tf.keras.Model
    rank = 0
    if is_library:
        import smdistributed.modelparallel.tensorflow as smp

        rank = smp.rank()
    model, optimizer = class_of_halves(side)(), tf.keras.optimizers.Adam(0.1)

    @side.step
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
        return loss, tape.gradient(loss, model.trainable_variables)

    update = tf.function(
        lambda *given: optimizer.apply_gradients(zip(given, model.trainable_variables, strict=True))
    )
    found: list[list[Any]] = [[], []]

    def read(reader: int) -> None:
        if not is_library or rank == reader:
            found[reader].append(READS[kind](model))

    loss, gradients = step(rows())
    given = [each.accumulate() for each in gradients]
    optimizer.apply_gradients(zip(given, model.trainable_variables, strict=True))
    for reader in range(2):
        read(reader)
        for variable in model.trainable_variables:
            variable.assign(1.5 * tf.convert_to_tensor(variable))
        read(reader)
        model.set_weights([each + 1.0 for each in model.get_weights()])
        read(reader)
        loss, gradients = step(rows(reader))
        read(reader)
        update(*[each.accumulate() for each in gradients])
        read(reader)
    mine = {
        f"{number} {place}": value
        for number, reads in enumerate(found)
        for place, value in enumerate(np.concatenate([np.ravel(each) for each in r]) for r in reads)
    }
    same = [loss.stack(), READS[kind](model)]
    if is_library:
        smp.barrier()  # as the end of a script is, where others are answered
    return Found(same, mine)
