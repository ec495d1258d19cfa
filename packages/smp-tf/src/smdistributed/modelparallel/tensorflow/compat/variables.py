"""Variables without memory, and who reads them."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.util import object_identity

from smdistributed.modelparallel.tensorflow.compat.autograph import not_converted
from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

Variable = Any
#: Classes of variables. Eager ones are of the second, which has some methods of its own.
VARIABLES = (resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable)


def variable_bytes(handle: Any) -> int:
    """Returns the size of the variable behind a handle; unknown dimensions count as 1."""
    data = handle._handle_data.shape_and_type[0]
    count: int = math.prod(max(int(dimension.size), 1) for dimension in data.shape.dim)
    return count * int(tf.as_dtype(data.dtype).size)


def empty_variable(like: Any, arguments: Mapping[str, Any]) -> Variable:
    """Returns a variable without memory, of the dtype of ``like``, and its shape if none is asked.

    Args:
        like: a tensor of any graph.
        arguments: of the call that was to create the variable.
    """
    shape = arguments.get("shape")
    with tf.init_scope():
        variable = resource_variable_ops.UninitializedVariable(
            trainable=arguments.get("trainable", True),
            name=arguments.get("name"),
            shape=like.shape if shape is None else shape,
            dtype=like.dtype.base_dtype,
            synchronization=arguments.get("synchronization"),
            aggregation=arguments.get("aggregation"),
        )
    # Optimizers of Keras 2 apply it.
    variable._constraint = arguments.get("constraint")
    return variable


class _Numbered(object_identity.Reference):  # type: ignore[misc]
    """A reference whose hash is not an address."""

    __slots__ = ("_number",)

    def __init__(self, variable: Variable, number: int) -> None:
        super().__init__(variable)
        self._number = number

    def __hash__(self) -> int:
        return self._number


def number(variable: Variable, place: int) -> None:
    """Makes sets of references to variables have the same order in all processes.

    TensorFlow goes through such sets where it builds custom gradients.

    Args:
        variable: TensorFlow's.
        place: a number that no other variable of the model has.
    """
    known = weakref.ref(variable)
    variable.ref = lambda: _Numbered(known(), place)


def free(variable: Variable) -> None:
    """Gives the memory of a variable back; it has no value from now on."""
    tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)


@contextlib.contextmanager
def checked_access(
    is_here: Callable[[Variable], bool],
    elsewhere: Callable[[Variable], Any],
    changes: Callable[[Variable], AbstractContextManager[None]],
    saved_alone: Callable[[Variable], None],
    restored: Callable[[Variable, Any], bool],
) -> Iterator[None]:
    """Within, variables are watched.

    Args:
        is_here: called with every variable that Python code reads or writes; tells whether this
            process has its value. If not, nothing is written.
        elsewhere: returns what stands for the value of a variable that is not here.
        changes: called with every variable that is written to, wherever its value is; returns
            within what that is done.
        saved_alone: called with every variable that a checkpoint of TensorFlow takes.
        restored: called with every variable that such a checkpoint is to give a value, and the
            value; returns whether that is done with.
    """
    writing = (
        *("assign", "assign_add", "assign_sub", "batch_scatter_update", "scatter_add"),
        *("scatter_div", "scatter_max", "scatter_min", "scatter_mul", "scatter_nd_add"),
        *("scatter_nd_max", "scatter_nd_min", "scatter_nd_sub", "scatter_nd_update"),
        *("scatter_sub", "scatter_update"),
    )

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Variable, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) if is_here(self) else _stand_in(self, elsewhere)

        unconverted: Callable[..., Any] = not_converted(read)
        return unconverted

    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Variable, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) if is_here(self) else tf.constant(True)

        unconverted: Callable[..., Any] = not_converted(ask)
        return unconverted

    def gathering(original: Callable[..., Any]) -> Callable[..., Any]:
        def gather(self: Variable, indices: Any, *args: Any, **kwargs: Any) -> Any:
            if is_here(self):
                return original(self, indices, *args, **kwargs)
            return tf.gather(_stand_in(self, elsewhere), indices)

        unconverted: Callable[..., Any] = not_converted(gather)
        return unconverted

    def changing(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(self: Variable, *args: Any, **kwargs: Any) -> Any:
            with changes(self):
                if is_here(self):
                    return original(self, *args, **kwargs)
            return self if tf.executing_eagerly() else _stand_in(self, elsewhere)

        unconverted: Callable[..., Any] = not_converted(change)
        return unconverted

    def restoring(original: Callable[..., Any]) -> Callable[..., Any]:
        def restore(self: Variable, tensors: Mapping[str, Any]) -> Any:
            (value,) = tensors.values()
            return self.handle if restored(self, value) else original(self, tensors)

        return restore

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def serialize(self: Variable) -> Any:
            # Asked for when restoring, too; only the values of the result are for saving.
            def value_of(each: Any) -> Any:
                def value() -> Any:
                    saved_alone(self)
                    return each.tensor

                return type(each)(value, dtype=each.dtype, device=each.device)

            return {key: value_of(each) for key, each in original(self).items()}

        return serialize

    makers = {
        **dict.fromkeys(writing, changing),
        "_read_variable_op": reading,
        "is_initialized": asking,
        "sparse_read": gathering,
        "_serialize_to_tensors": saving,
        "_restore_from_tensors": restoring,
    }
    with replaced(
        Replacement(kind, name, make)
        for kind in VARIABLES
        for name, make in makers.items()
        if name in vars(kind)
    ):
        yield


def _stand_in(variable: Variable, elsewhere: Callable[[Variable], Any]) -> Any:
    """Returns what stands for the value of a variable, which tapes take for it."""
    resource_variable_ops.variable_accessed(variable)
    result = elsewhere(variable)
    record.record_operation(
        "ReadVariableOp", [result], [variable.handle], backward_function=lambda dy: [dy]
    )
    return result
