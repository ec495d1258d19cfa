"""The values of a whole model: as a list on every process, or all in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.groups import RankType
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.parameters.owners import owner_of
from smdistributed.modelparallel.tensorflow.parameters.variables import home_of, is_here


def gathered(engine: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the values of variables, wherever they live.

    Collective: the pipeline, each process at this or at another point, see ``Rendezvous``.
    """
    own, asked = {}, {}
    for place, variable in enumerate(map(keras.variable_of, variables)):
        if is_here(variable):
            with unnoted():
                own[place] = variable.numpy()
        else:
            owner: Any = owner_of(variable)
            asked[place] = owner.as_read(engine.runtime.moments.now)
    found = engine.runtime.rendezvous.read(f"the weights of {engine.name}", own, asked)
    return [found[place] for place in range(len(variables))]


def collected(engine: Any, receives: bool) -> list[Any]:
    """Brings all variables to the first partition; returns those that do not live there."""
    runtime = engine.runtime
    borrowed = []
    with runtime.guard.suspended():
        for variable in map(keras.variable_of, engine.everywhere()[1]):
            home = home_of(variable)
            if home is None or home.partition == 0:
                continue
            if home.is_here:
                runtime.communicator.send(variable.numpy(), 0, RankType.PP_RANK)
            elif receives:
                value = runtime.communicator.recv_from(home.partition, RankType.PP_RANK)
                variable.assign(value)
                borrowed.append(variable)
    return borrowed


def distribute(engine: Any, variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Gives those of the variables that live here their values.

    Raises:
        ValueError: the values do not fit the variables; on every process alike.
    """
    if len(values) != len(variables):
        raise ValueError(
            f"set_weights takes a value for each variable of the whole model, {len(variables)} of "
            f"{engine.name}, on every process; received {len(values)}: give what get_weights "
            "returned."
        )
    for variable, value in zip(variables, values, strict=True):
        if tuple(variable.shape) != np.shape(value):
            raise ValueError(
                f"set_weights takes values of the shapes of variables; {keras.path_of(variable)} "
                f"has {tuple(variable.shape)}, received {np.shape(value)}: give the values in the "
                "order of get_weights."
            )
    engine.runtime.rendezvous.arrive("set_weights")
    with unnoted():
        for variable, value in zip(variables, values, strict=True):
            if is_here(variable):
                own = keras.variable_of(variable)
                own.assign(tf.cast(value, own.dtype))
