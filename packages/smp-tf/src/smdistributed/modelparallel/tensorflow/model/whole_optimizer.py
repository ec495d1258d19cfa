"""An optimizer with the state of all processes, each of which has that of its own variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.groups import RankType
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.parameters.variables import is_here

#: Numbers by the place of the trained variable in the model, and by the name of the slot.
_State = dict[tuple[int, str], Any]


def collected_state(engine: Any, optimizer: Any, receives: bool) -> _State:
    """Brings what an optimizer keeps of variables to the first partition. Collective: pipeline.

    Args:
        engine: of the model.
        optimizer: of this process.
        receives: whether this process is the first one of the first replica.
    """
    runtime = engine.runtime
    own = _own_state(engine, optimizer)
    if runtime.coordinates.pp_rank != 0:
        runtime.communicator.send(own, 0, RankType.PP_RANK)
    elif receives:
        for partition in range(1, runtime.topology.pp_size):
            own |= runtime.communicator.recv_from(partition, RankType.PP_RANK)
    return own


def with_state(engine: Any, optimizer: Any, state: _State) -> Any:
    """Returns an optimizer like the one of this process that trains the variables of all."""
    with unnoted():
        whole = type(optimizer).from_config(optimizer.get_config())
        trained = engine.everywhere()[0]
        keras.build_optimizer(whole, trained)
        slots = keras.optimizer_slots(whole)
        for (place, name), value in state.items():
            slots[name][keras.slot_key(whole, trained[place])].assign(value)
        pairs = zip(_others(whole), _others(optimizer), strict=True)
        for variable, own in pairs:
            variable.assign(tf.convert_to_tensor(own))
    return whole


def _own_state(engine: Any, optimizer: Any) -> _State:
    slots = keras.optimizer_slots(optimizer)
    with unnoted():
        return {
            (place, name): keras.variable_of(kept[key]).numpy()
            for place, variable in enumerate(engine.everywhere()[0])
            for key in [keras.slot_key(optimizer, variable)]
            for name, kept in slots.items()
            if key in kept and is_here(variable)
        }


def _others(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer has for all: the rate, counters, scales."""
    slots = keras.optimizer_slots(optimizer)
    known = {id(each) for kept in slots.values() for each in kept.values()}
    return [each for each in keras.optimizer_variables(optimizer) if id(each) not in known]
