"""Values of one partition that a script keeps, in variables of its own or for later.

Where Python alone reads a variable, the process that has had its values keeps them, and the others
have stand-ins. A graph is made once and reads whatever is there when it runs, so a variable that a
graph reads has its value in all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import resources
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.gradients.meeting import brought
from smdistributed.modelparallel.tensorflow.parameters.owners import note, owner_of
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime

_READ = "_smp_is_read_by_graphs"


def outside_of(handle: Any) -> Any:
    """Returns the handle outside of all functions that one in a graph stands for."""
    if hasattr(handle, "graph") and not isinstance(handle, tf.__internal__.EagerTensor):
        return resources.origin(handle.graph, handle)
    return handle


def note_read(handle: Any) -> None:
    """Notes that a graph reads a variable."""
    handle = outside_of(handle)
    if hasattr(handle, "__dict__"):
        setattr(handle, _READ, True)


def must_be_everywhere(handle: Any) -> bool:
    """Tells whether what is written to a script's own variable is to be in all processes."""
    return not tf.executing_eagerly() or getattr(outside_of(handle), _READ, False)


def in_all_processes(runtime: TFRuntime, variable: Any) -> Any:
    """Returns a variable, or its value if it is a script's own that one process keeps.

    Collective: pipeline.
    """
    owner = owner_of(variable.handle)
    if owner is None or owner.variable is not None:
        return variable
    return brought(runtime, [variable.read_value()])[0]


def bring_kept(runtime: TFRuntime, captured: dict[str, Any], variables: Sequence[Any]) -> None:
    """Brings what a traced call takes from around it to all processes. Collective: pipeline.

    Args:
        runtime: of this process.
        captured: by name of placeholder, the tensor outside; is given those that are brought.
        variables: that are not the model's but are used by its call.
    """
    by_handle = {id(variable.handle): variable for variable in variables}
    for name, outside in list(captured.items()):
        owner = owner_of(outside)
        variable = by_handle.get(id(outside))
        if outside.dtype == tf.resource:
            note_read(outside)
        if owner is None or owner.variable is not None:
            continue
        with tf.init_scope():
            if variable is not None:
                (value,) = brought(runtime, [variable.read_value()])
                with unnoted():
                    variable.assign(value)
                note(outside, None)
            elif isinstance(outside, tf.__internal__.EagerTensor):
                (captured[name],) = brought(runtime, [outside])
