"""Lists of variables, whenever a script asks for them, see ``tf_beside``.

A population: whose variables x when they are asked for x the name by which x whether the list is
copied x what is done with it. Of a model without variables the early list is empty, in Keras too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tf_beside import Found, Side, by_name, on_side
from tf_calls import WIDTH, rows
from tf_users import IS_KERAS_3, dense, model_of
from tf_worlds import forget_models

Variables = Sequence[Any]

PLACES: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "layer": lambda model: model.first,
    "submodel": lambda model: model.inner,
}
NAMES = ("trainable_variables", "trainable_weights", "variables", "weights")
COPIES: dict[str, Callable[[Variables], Variables]] = {"itself": lambda given: given, "copy": list}
MOMENTS = ("before", "of a built one", "in a hook", "in the body", "after")
#: The gradients are asked for by the list, or by one of the moment; and the update.
USES = ("pairs", "lists", "pairs by tape", "lists by tape", *(["built"] if IS_KERAS_3 else []))


class Case(NamedTuple):
    """A member of the population."""

    place: str
    moment: str
    name: str
    copy: str
    use: str


def _all() -> list[Case]:
    every = (Case(*each) for each in itertools.product(PLACES, MOMENTS, NAMES, COPIES, USES))
    return [each for each in every if each.place == "model" or each.copy == "itself"]


#: Lists of other things than the model are Keras's own, and copies in any case.
ALL = tuple(_all())


def _model(side: Side, is_built: bool) -> Any:
    inner = tf.keras.Sequential([tf.keras.layers.Dense(WIDTH, name="second")], name="inner")

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.inner(x)

    model = model_of(side, call, first=dense("first"), inner=lambda: inner)
    if is_built:
        model.first.build((None, WIDTH))
        model.inner.build((None, WIDTH))
    return model


def trained(side: Side, case: Case) -> Found:
    """Trains for two steps by a list of variables."""
    model = _model(side, case.moment == "of a built one")
    optimizer = tf.keras.optimizers.SGD(0.3)
    taken: list[Any] = []

    def take() -> None:
        if not taken:
            where = PLACES[case.place](model)
            taken.append(COPIES[case.copy](getattr(where, case.name)))

    @side.step
    def compute(x: Any) -> Any:
        if case.moment == "in the body":
            take()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
        by_list = "by tape" in case.use or case.use == "built"
        asked = taken[0] if by_list and taken else getattr(PLACES[case.place](model), case.name)
        return tape.gradient(loss, list(asked)), loss

    if case.moment in ("before", "of a built one"):
        take()
    elif case.moment == "in a hook" and side.base is not tf.keras.Model:
        import smdistributed.modelparallel.tensorflow as smp

        smp.register_post_partition_hook(take)
    losses = []
    for _ in range(2):
        gradients, loss = compute(rows())
        take()  # else
        means = [None if each is None else each.accumulate() for each in gradients]
        _together(side, lambda: _update(case.use, optimizer, means, taken[0]))  # noqa: B023
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def _together(side: Side, action: Callable[[], None]) -> None:
    """Fails on each rank where one fails, as a job ends by it."""
    try:
        action()
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures = [failure]
    if side.base is not tf.keras.Model:
        import smdistributed.modelparallel.tensorflow as smp

        failures = smp.allgather(failure, smp.PP_GROUP)
    if any(failures):
        raise ValueError(next(filter(None, failures)))


def _update(use: str, optimizer: Any, means: Sequence[Any], variables: Variables) -> None:
    if use == "built":
        if not optimizer.built:
            optimizer.build(list(variables))
        optimizer.apply(means)
    elif use.startswith("lists") and IS_KERAS_3:
        optimizer.apply(means, variables)
    else:
        optimizer.apply_gradients(list(zip(means, variables, strict=False)))


def outcomes(is_alone: bool, cases: Sequence[Case]) -> list[Found | str]:
    """Returns what each case found, or why it was refused."""
    return [_outcome(is_alone, case) for case in cases]


def _outcome(is_alone: bool, case: Case) -> Found | str:
    if is_alone:
        tf.keras.utils.set_random_seed(0)
    else:
        forget_models()
    try:
        return on_side(trained, is_alone, case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
