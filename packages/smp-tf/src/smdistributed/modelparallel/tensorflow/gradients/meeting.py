"""Numbers that all processes of a pipeline compute together, wherever their script is.

Each says where it is, so that numbers of different lines are an error, not mixed up.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime

#: What lies between a line of a script and an operation.
_LIBRARIES = ("/tensorflow/", "/keras/", "/tf_keras/", "/smdistributed/", "contextlib")
#: How many numbers go from process to process at once, at most: a sum, and of how many numbers.
_MOST_NUMBERS = 2


def of_partitions(runtime: TFRuntime, numbers: Sequence[Any]) -> list[Any]:
    """Returns numbers of all partitions, those of one kind in a row. Collective: pipeline.

    In double precision, as bits, which add up to themselves where others have zeros. Integers
    stay in the memory of the host, where transfers need no order.
    """
    place = _place_in_script()
    if tf.executing_eagerly():
        runtime.places.append(place)
    else:
        note_places(tf.compat.v1.get_default_graph(), [place])
    row = tf.stack([tf.cast(each, tf.float64) for each in numbers])
    row = tf.pad(tf.bitcast(row, tf.int64), [[0, _MOST_NUMBERS - len(numbers)]])
    columns = _exchanged(runtime, place, row)
    return [tf.bitcast(each, tf.float64) for each in columns[: len(numbers)]]


def _place_in_script() -> int:
    """Returns a number for the line of the script that is being executed, alike on all processes.

    Only a checksum: names of files differ where AutoGraph writes the code anew.
    """
    frame = frame_of_script()
    return 1 + zlib.crc32(f"{frame.f_code.co_name}:{frame.f_lineno}".encode())


def frame_of_script() -> Any:
    """Returns the frame of the script's line that is being executed."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_of_libraries(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_of_libraries(path: str) -> bool:
    return any(each in path for each in _LIBRARIES)


def _exchanged(runtime: TFRuntime, place: int, row: Any) -> list[Any]:
    """Returns the numbers of each column of the rows of all partitions. Collective: pipeline.

    Args:
        runtime: of this process.
        place: in the script; 0 where the next step begins. Eagerly it is compared at once.
        row: int64 tensor of ``_MOST_NUMBERS``.

    Raises:
        UnsupportedError: the others are at another place; on every process.
    """
    ranks = runtime.pipeline_ranks
    own = tf.concat([[tf.constant(place, tf.int64)], row], 0)[tf.newaxis]
    before = ranks.index(runtime.rank)
    own = tf.pad(own, [[before, len(ranks) - 1 - before], [0, 0]])
    every = runtime.links.all_reduce(own, CommGroup.PP_GROUP, ranks)
    columns: list[Any] = tf.unstack(every, axis=1)
    if tf.executing_eagerly():
        _refuse_unequal(runtime, [[each] for each in columns[0].numpy().tolist()])
    return columns[1:]


def _refuse_unequal(runtime: TFRuntime, places: Sequence[Sequence[int]]) -> None:
    """Raises if processes have made numbers in other places: they would be mixed up.

    Raises:
        UnsupportedError: they have; on every process.
    """
    if any(each != places[0] for each in places):
        runtime.places.clear()
        raise UnsupportedError(
            "numbers of all variables or gradients are computed on every process of a pipeline, as "
            f"often and in one order; ranks {runtime.pipeline_ranks} came to different lines of "
            "the script, or some of them more often: compute them once, not again for each "
            "variable, of all of model.trainable_variables or their gradients, outside of "
            "conditions on the rank."
        )


def note_places(graph: Any, places: Sequence[int]) -> None:
    """Notes in a graph, and in those around it, which numbers, or a step function, it has."""
    while hasattr(graph, "outer_graph"):
        graph._smp_places = [*getattr(graph, "_smp_places", []), *places]
        graph = graph.outer_graph


def begin_function(runtime: TFRuntime, graph: Any) -> None:
    """Sees to it that processes call a function with a step or such numbers in it alike.

    Collective: pipeline, before the first call, and wherever eager numbers came before.

    Raises:
        UnsupportedError: they have made other numbers; on every process.
    """
    places = getattr(graph, "_smp_places", None)
    if places is None or not tf.executing_eagerly():
        return
    with unnoted():
        if runtime.places:
            runtime.places.clear()
            _exchanged(runtime, 0, tf.zeros([_MOST_NUMBERS], tf.int64))
        if not getattr(graph, "_smp_agreed", False):
            graph._smp_agreed = True
            _refuse_unequal(runtime, runtime.communicator.allgather(places, CommGroup.PP_GROUP))
