"""Values that one partition has, brought to all processes of its pipeline.

Eagerly the control plane carries them, see ``runtime.rendezvous``. Graphs have transfers of their
own, whose places are compared before a function is called for the first time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat.gradients import unrecorded, with_gradient
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.gradients.repeating import can_make_again, made_again
from smdistributed.modelparallel.tensorflow.parameters.moments import Changes, changes_of
from smdistributed.modelparallel.tensorflow.parameters.owners import note, owner_of
from smdistributed.modelparallel.tensorflow.runtime.rendezvous import NotGivenError
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime
from smdistributed.modelparallel.tensorflow.runtime.script import frame_of_script

#: As what values travel in graphs: integers, which add up to themselves where others have zeros,
#: and which stay in the memory of the host, where transfers need no order.
_AS_BITS = {
    tf.float64: tf.int64,
    tf.complex64: tf.int64,
    tf.float32: tf.int32,
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
}


def told(runtime: TFRuntime, value: Any) -> Any:
    """Returns the numbers of an eager tensor that one partition has.

    Collective: pipeline, each process at this or at another point, see ``Rendezvous``.
    """
    return _from_owners(runtime, [value])[0]


def brought(runtime: TFRuntime, values: Sequence[Any]) -> list[Any]:
    """Returns values that partitions have as all processes have them. Collective: pipeline.

    The gradient of each is that of the value, in the process that has it.

    Raises:
        UnsupportedError: a graph does not know the shape of one.
    """
    owners: list[Any] = [owner_of(each) for each in values]
    for value, owner in zip(values, owners, strict=True):
        _refuse_unnumbered(value, owner)
    with unnoted():
        values = [tf.convert_to_tensor(each) for each in values]
        if tf.executing_eagerly():
            for value, owner in zip(values, owners, strict=True):
                note(value, owner_of(value) or owner)  # of a variable here its value has none yet
            every = _from_owners(runtime, values)
            with unrecorded():
                whole = [
                    tf.constant(found, value.dtype)
                    for found, value in zip(every, values, strict=True)
                ]
        else:
            note_places(tf.compat.v1.get_default_graph(), [_place_in_script()])
            whole = _summed(runtime, values, owners)
        return [_differentiated(*pair) for pair in zip(values, whole, strict=True)]


def on_all(runtime: TFRuntime, values: Sequence[Any]) -> list[Any]:
    """Returns values such that all processes have each. Collective: pipeline, if one is owned."""
    owned = [each for each in values if owner_of(each) is not None]
    whole = iter(brought(runtime, owned) if owned else ())
    return [each if owner_of(each) is None else next(whole) for each in values]


def _from_owners(runtime: TFRuntime, values: Sequence[Any]) -> list[Any]:
    """Returns the numbers of eager tensors that partitions have."""
    owners: list[Any] = [owner_of(each) for each in values]
    own, asked = {}, {}
    for place, (value, owner) in enumerate(zip(values, owners, strict=True)):
        if owner.is_here:
            own[place] = value._numpy()
        else:
            asked[place] = owner
    frame = frame_of_script()
    line = f"values of {owners[0].name} in line {frame.f_lineno} of {frame.f_code.co_name}"
    try:
        can_compute = all(can_make_again(values[place]) for place in asked)
        found = runtime.rendezvous.read(line, own, asked, can_compute)
    except NotGivenError:
        found = own | {place: _computed_here(runtime, values[place]) for place in asked}
        if any(each is None for each in found.values()):
            raise
    return [found[place] for place in range(len(values))]


def _computed_here(runtime: TFRuntime, value: Any) -> Any:
    """Returns the numbers of a value that its owner does not compute; None if that cannot be."""

    def told(variable: Any) -> Any:
        owner: Any = owner_of(variable)
        found = runtime.rendezvous.read(f"the value of {owner.name}", {}, {0: owner})[0]
        return tf.constant(found, variable.dtype)

    return made_again(value, told)


def _summed(runtime: TFRuntime, values: Sequence[Any], owners: Sequence[Any]) -> list[Any]:
    """Returns values of partitions, in a graph, as sums with the zeros of others.

    All of a type go in one row.
    """
    rows: dict[Any, list[Any]] = {}
    places = []
    with unrecorded():
        for value, owner in zip(values, owners, strict=True):
            bits = _bits_of(value, owner)
            row = rows.setdefault(bits.dtype, [])
            places.append((bits.dtype, sum(each.shape[0] for each in row)))
            row.append(bits)
        totals = {
            dtype: runtime.links.all_reduce(
                tf.concat(row, 0), CommGroup.PP_GROUP, runtime.pipeline_ranks
            )
            for dtype, row in rows.items()
        }
        found = []
        for value, (dtype, begin) in zip(values, places, strict=True):
            bits = totals[dtype][begin : begin + value.shape.num_elements()]
            found.append(_of_bits(tf.reshape(bits, value.shape), value.dtype))
        return found


def _bits_of(value: Any, owner: Any) -> Any:
    """Returns the numbers of a value in a row, as what travels; zeros where it is not here."""
    if not value.shape.is_fully_defined() or value.dtype == tf.complex128:
        raise UnsupportedError(
            "what is computed of variables or gradients of several partitions in a graph goes to "
            f"all processes, as tensors of a known shape; received {value.shape} of "
            f"{value.dtype.name}, of {owner.name}: compute it eagerly, outside of the function, or "
            "without tf.boolean_mask and others whose shape depends on numbers."
        )
    bits = value
    while bits.dtype in _AS_BITS:
        to = _AS_BITS[bits.dtype]
        is_same = to.size == bits.dtype.size
        bits = tf.bitcast(bits, to) if is_same else tf.cast(bits, to)
    if bits.dtype not in (tf.int32, tf.int64):
        bits = tf.cast(bits, tf.int64)
    count = value.shape.num_elements()
    return tf.reshape(bits, [count]) if owner.is_here else tf.zeros([count], bits.dtype)


def _refuse_unnumbered(value: Any, owner: Any) -> None:
    """Raises if a value is no tensor of numbers.

    Raises:
        UnsupportedError: it is none.
    """
    if value.dtype == tf.variant:
        raise UnsupportedError(
            "a list of tensors (of a loop, a tf.map_fn, a dataset) stays where it was made; "
            f"received one that is computed of {owner.name}, which is on one partition, where all "
            "processes need it: compute it eagerly, or by operations on whole tensors."
        )


def _of_bits(bits: Any, dtype: Any) -> Any:
    if bits.dtype == dtype:
        return bits
    if dtype not in _AS_BITS:
        return tf.cast(bits, dtype)
    to = _AS_BITS[dtype]
    value = _of_bits(bits, to)
    return tf.bitcast(value, dtype) if to.size == dtype.size else tf.cast(value, dtype)


def _differentiated(value: Any, whole: Any) -> Any:
    """Returns what all processes have such that its gradient is that of the value here."""
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return whole

    def gradient(of_value: Any, of_whole: Any) -> list[Any]:
        given = [each for each in (of_value, of_whole) if each is not None]
        return [tf.add_n(given) if given else None, None]

    return with_gradient([value, whole], gradient, "SmpBrought")[1]


def _place_in_script() -> int:
    """Returns a number for the line of the script that is being executed, alike on all processes.

    Only a checksum: names of files differ where AutoGraph writes the code anew.
    """
    frame = frame_of_script()
    return 1 + zlib.crc32(f"{frame.f_code.co_name}:{frame.f_lineno}".encode())


def note_places(graph: Any, places: Sequence[int]) -> None:
    """Notes in a graph, and in those around it, which transfers, or a step function, it has."""
    while hasattr(graph, "outer_graph"):
        graph._smp_places = [*getattr(graph, "_smp_places", []), *places]
        graph = graph.outer_graph


def begin_function(runtime: TFRuntime, graph: Any) -> None:
    """Sees to it that processes call a function with a step or such transfers in it alike.

    Collective: pipeline.

    Raises:
        UnsupportedError: they have made other transfers; on every process.
        CommError: another process has come to another point of the script.
    """
    if not tf.executing_eagerly():
        return
    places, changes = getattr(graph, "_smp_places", None), changes_of(graph)
    if places is None:
        if changes is Changes.UPDATES:
            runtime.rendezvous.arrive("an update by an optimizer in a function")
        elif changes is Changes.ASSIGNS:
            runtime.moments.forget()
        return
    if not hasattr(graph, "_smp_number"):
        _agree(runtime, places)
        graph._smp_number = runtime.rendezvous.new_number()
    with unnoted():
        # TensorFlow names a function otherwise where this process alone makes variables in it.
        runtime.rendezvous.arrive(f"a call of function number {graph._smp_number}")


def _agree(runtime: TFRuntime, places: Sequence[int]) -> None:
    with unnoted():
        every = runtime.communicator.allgather(places, CommGroup.PP_GROUP)
    if any(each != every[0] for each in every):
        raise UnsupportedError(
            "values of all variables or gradients are computed on every process of a pipeline, as "
            f"often and in one order; ranks {runtime.pipeline_ranks} came to different lines of "
            "the script, or some of them more often: compute them outside of conditions on the "
            "rank."
        )
