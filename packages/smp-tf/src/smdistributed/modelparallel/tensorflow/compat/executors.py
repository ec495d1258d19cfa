"""Which of TensorFlow's executors runs a function.

The usual one hands every operation that is ready to the threads of a pool, which costs time of the
processor for each, and gains nothing where a process has one core. The one of a single thread runs
operations one after the other in the thread that calls the function. It knows no loops, branches
and transfers between devices, and waits in its thread for an operation that ends in another one:
if all threads of the pool wait so, none is left to do what they wait for.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import functions, graphs

#: Names of the executors, as operations that call functions have them.
USUAL, SINGLE_THREADED = "", "SINGLE_THREADED_EXECUTOR"
#: Of the operations with effects or state, those that end in the thread that starts them: an
#: operation that is not known here may be a queue, or a transfer.
_ENDING_AT_ONCE = frozenset(
    {
        *("ReadVariableOp", "VarIsInitializedOp", "VariableShape", "DisableCopyOnRead"),
        *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
        *("ResourceGather", "ResourceGatherNd"),
        *(f"ResourceScatter{how}" for how in ("Update", "Add", "Sub", "Mul", "Div", "Min", "Max")),
        *(f"ResourceScatterNd{how}" for how in ("Update", "Add", "Sub", "Min", "Max")),
        "CheckNumerics",
    }
)
_OF_LOOPS_AND_BRANCHES = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration"})


def executor_of(operations: Iterable[graphs.Operation]) -> str:
    """Returns the executor of a function where there is one core, given its operations."""
    return SINGLE_THREADED if all(map(_fits_one_thread, operations)) else USUAL


def _fits_one_thread(operation: graphs.Operation) -> bool:
    if operation.type in _OF_LOOPS_AND_BRANCHES or functions.called(operation.node_def):
        return False
    place = tf.DeviceSpec.from_string(operation.device)
    if place.device_type not in (None, "CPU") or place.device_index not in (None, 0):
        return False
    return not graphs.is_stateful(operation) or operation.type in _ENDING_AT_ONCE
