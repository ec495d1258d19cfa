"""What a script computes of variables and gradients, wherever these are.

A value of one partition is computed in its process, and by stand-ins in the others. Where values of
several partitions meet, or where one leaves TensorFlow, it is brought to all processes first. So
each number that a script sees, decides by or writes is that of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import functions, operations, resources
from smdistributed.modelparallel.tensorflow.compat.gradients import is_followed
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.gradients.kept import must_be_everywhere, note_read
from smdistributed.modelparallel.tensorflow.gradients.meeting import begin_function, brought, told
from smdistributed.modelparallel.tensorflow.gradients.repeating import note_made
from smdistributed.modelparallel.tensorflow.parameters.moments import Changes, note_changes
from smdistributed.modelparallel.tensorflow.parameters.owners import (
    note,
    owner_of,
    stand_in,
)
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime

_WRITING = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
#: What tells something else of a value than its numbers.
_ABOUT = frozenset({"Rank", "Shape", "ShapeN", "Size", "VarIsInitializedOp", "VariableShape"})
_CALLING = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_LOOPING = frozenset({"While", "StatelessWhile"})
_BRANCHING = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
#: What fails for some numbers, as those of a stand-in may be.
_FAILING = frozenset(
    {
        *("CheckNumerics", "CheckNumericsV2", "Cholesky", "MatrixInverse", "MatrixSolve"),
        *("MatrixTriangularSolve", "LogMatrixDeterminant", "SelfAdjointEigV2", "Eig", "Svd"),
    }
)
_NO_NUMBERS = (tf.string, tf.resource)


def followed(runtime: TFRuntime) -> AbstractContextManager[None]:
    """Within, values of partitions are brought to all processes where a script needs them."""
    return operations.operations_noted(_Following(runtime))


def given_to_optimizers(
    runtime: TFRuntime, pairs: Sequence[tuple[Any, Any]]
) -> list[tuple[Any, Any]]:
    """Returns gradients and variables such that the process that updates one has its gradient."""
    if tf.executing_eagerly():
        if not operations.is_unnoted():  # else an optimizer in another one, of this process alone
            runtime.rendezvous.arrive("an update by an optimizer")
    else:
        note_changes(tf.compat.v1.get_default_graph(), Changes.UPDATES)
    found = []
    for gradient, variable in pairs:
        owner, to = _owner_of_gradient(gradient), _owner(variable)
        if owner is not None and (to is None or to.partition != owner.partition):
            gradient = brought(runtime, [tf.convert_to_tensor(gradient)])[0]
        found.append((gradient, variable))
    return found


def _owner_of_gradient(gradient: Any) -> Any:
    return _owner(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)


class _Following:
    """Follows what is computed of variables and gradients.

    Args:
        runtime: of this process.
    """

    def __init__(self, runtime: TFRuntime) -> None:
        self._runtime = runtime

    def before(self, kind: str, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Takes what an operation is to be made of.

        Returns:
            what to make it of, and what ``after`` is to know.
        """
        owned = [each for each in _values_in(args) if _owner(each) is not None]
        if not owned:
            if not tf.executing_eagerly() and kind not in _WRITING | _ABOUT | _CALLING:
                for each in filter(_is_handle, _values_in(args)):
                    note_read(each)
            return args, None
        if kind in _ABOUT or kind in _CALLING:
            return args, None
        if kind == "IdentityN":
            return args, [_owner(each) for each in _values_in(args)]
        if kind in _WRITING:
            return self._written(args), None
        values = [each for each in owned if not _is_handle(each)]
        if kind in _LOOPING or kind in _BRANCHING:
            # Of branches all but the first argument is followed in them.
            first = values if kind in _LOOPING else [each for each in values if each is args[0]]
            return self._brought(args, first) if first else args, None
        if values and self._must_bring(kind, args, owned):
            args = self._brought(args, values)
            owned = [each for each in owned if _is_handle(each)]
        owners = [_owner(each) for each in owned]
        if len({each.partition for each in owners}) > 1:
            raise UnsupportedError(
                f"an operation changes variables of one partition; received {kind} of "
                f"{owners[0].name} and {owners[-1].name}, which are on several: write an operation "
                "for each."
            )
        if not owners:
            return args, None
        weights = [each for each in owners if not each.is_gradient]
        owner = (weights or owners)[0]
        is_same = kind == "Identity" and owner.variable is None
        return args, owner if is_same else owner.of_value

    def after(
        self, kind: str, known: Any, results: Sequence[Any], again: operations.Again | None
    ) -> None:
        """Notes who has the results of an operation, and how those of others are made."""
        if known is None:
            if kind in _LOOPING or kind in _BRANCHING:
                _note_branches(kind, results)
            return
        owners = known if isinstance(known, list) else [known] * len(results)
        for result, owner in zip(results, owners, strict=True):
            if getattr(result, "dtype", tf.string) not in _NO_NUMBERS:
                note(result, owner)
        if again is None or isinstance(known, list):
            return
        if not known.is_here and known.number is None:
            note_made(self._runtime.moments, results, again)

    def call(self, graph: Any, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Takes what a function is to be called with; as ``before``."""
        begin_function(self._runtime, graph)
        captured = {id(inside) for _, inside in graph.captures}
        pairs = list(zip(graph.inputs, args, strict=False))
        given = [
            each
            for inside, each in pairs
            if id(inside) not in captured and not _is_handle(each) and _owner(each) is not None
        ]
        if not given:
            return args, None
        owners = {_owner(each).partition for each in given}
        if len(owners) == 1 and _is_of(graph, owners):
            return args, _owner(given[0]).of_value
        return self._brought(args, given), None

    def called(self, graph: Any, known: Any, results: Sequence[Any]) -> None:
        """Notes who has the results of a function."""
        for result, inside in zip(results, graph.outputs, strict=False):
            if getattr(result, "dtype", tf.string) not in _NO_NUMBERS:
                note(result, _owner(inside) or known)

    def differentiated(
        self, sources: Sequence[Any], gradients: Sequence[Any], reached: Any, watched: Any
    ) -> list[Any]:
        """Returns gradients, with stand-ins for those that other processes have.

        Args:
            sources: of which gradients were asked.
            gradients: of this process.
            reached: gradients of variables of others on which the targets depend, by ``id``.
            watched: ``id`` of each variable that the tape watches; None without one.
        """
        found = []
        for source, gradient in zip(sources, gradients, strict=True):
            owner = _owner(source)
            if owner is None:
                found.append(gradient)
                continue
            variable = owner.variable
            like = gradient
            if variable is not None and not owner.is_here:
                is_watched = watched is None or id(variable) in watched
                like = reached.get(id(variable), gradient) if is_watched else gradient
                gradient = None if like is None else stand_in(like, owner.of_gradient)
            elif gradient is not None:
                is_sparse = isinstance(gradient, tf.IndexedSlices)
                for part in (gradient.values, gradient.indices) if is_sparse else (gradient,):
                    note(part, owner.of_gradient)
            found.append(gradient)
        return found

    def is_owned(self, tensor: Any) -> bool:
        """Tells whether one partition has an eager tensor, so that all have to ask for it."""
        return owner_of(tensor) is not None

    def numbers(self, tensor: Any) -> Any:
        """Returns the numbers of a tensor of another process; None of one that is here alone."""
        if owner_of(tensor) is None:
            return None
        with unnoted():
            return told(self._runtime, tensor)

    def packed(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Takes a list of which TensorFlow makes a tensor by itself; as ``before``."""
        owned = [each for each in _values_in([values]) if _owner(each) is not None]
        if len({_owner(each).partition for each in owned}) > 1:
            return self._brought([values], owned)[0], None
        return values, _owner(owned[0]).of_value if owned else None

    def assigned(self, variable: Any, value: Any) -> Any:
        """Returns what to write to a variable, which may live elsewhere."""
        to, owner = _owner(variable), _owner(value)
        if to is None or to.variable is None or owner is None:
            return value
        return value if owner.partition == to.partition else brought(self._runtime, [value])[0]

    def _must_bring(self, kind: str, args: Sequence[Any], owned: Sequence[Any]) -> bool:
        if len({_owner(each).partition for each in owned}) > 1:
            return True
        if kind in _FAILING or operations.leaves(kind):
            return True
        handles = [each for each in _values_in(args) if _is_handle(each)]
        if handles and not any(map(_owner, handles)):
            return True  # a queue, a table, an iterator, which keeps it
        # Gradients of what all processes have must be computed alike in all of them.
        is_of_gradients = all(_owner(each).is_gradient for each in owned)
        others = [each for each in _values_in(args) if tf.is_tensor(each) and _owner(each) is None]
        in_body = self._runtime.current_step is not None and not is_of_gradients
        others = [each for each in others if tf.as_dtype(each.dtype).is_floating]
        return any(is_followed(each, in_body) for each in others)

    def _brought(self, args: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        """Returns arguments with these values as all processes have them."""
        whole = dict(zip(map(id, values), brought(self._runtime, values), strict=True))
        found: Sequence[Any] = _replaced(args, whole)
        return found

    def _written(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns what to write to a variable, and notes who has its value from now on."""
        handle, value, *_ = args
        to, owner = _owner(handle), _owner(value)
        if owner is None:
            return args
        if to is None and not must_be_everywhere(handle):
            note(handle, owner.of_value)
            return args
        if to is not None and to.partition == owner.partition:
            return args
        # Also of a script's own, which stays right in the process that has had its values so far.
        return self._brought(args, [value])


def _values_in(args: Sequence[Any]) -> Iterator[Any]:
    for each in args:
        if isinstance(each, (list, tuple)):
            yield from _values_in(each)
        else:
            yield each


def _replaced(args: Any, whole: dict[int, Any]) -> Any:
    if isinstance(args, (list, tuple)):
        return [_replaced(each, whole) for each in args]
    return whole.get(id(args), args)


def _is_handle(value: Any) -> bool:
    return bool(getattr(value, "dtype", None) == tf.resource)


def _owner(value: Any) -> Any:
    """Returns who has a tensor, also one that a function takes from around it; or None."""
    owner = owner_of(value)
    if owner is not None or not tf.is_tensor(value):
        return owner
    if isinstance(value, tf.__internal__.EagerTensor) or getattr(value, "op", None) is None:
        return None
    if value.op.type == "Placeholder":
        owner = owner_of(resources.origin(value.graph, value))
        note(value, owner)
    return owner


def _note_branches(kind: str, results: Sequence[Any]) -> None:
    """Notes who has the results of a branch or a loop, whose functions were followed before.

    Raises:
        UnsupportedError: that depends on the branch, or on the turn.
    """
    if not results or not hasattr(results[0], "op") or results[0].op is None:
        return
    operation = results[0].op
    graphs = [
        functions.own_graph(operation.graph, name) for name in functions.called(operation.node_def)
    ]
    graphs = [each for each in graphs if each is not None and len(each.outputs) == len(results)]
    for place, result in enumerate(results):
        owners = [_owner(each.outputs[place]) for each in graphs]
        known = [each for each in owners if each is not None]
        if not known or result.dtype in _NO_NUMBERS:
            continue
        if kind in _LOOPING or len({each.partition for each in known}) > 1:
            raise UnsupportedError(
                "a loop or a branch of TensorFlow computes with values that one partition has, of "
                f"{known[0].name}, and hands them on: write the loop in Python, or read the value "
                "before it."
            )
        note(result, known[0].of_value)


def _is_of(graph: Any, partitions: set[int]) -> bool:
    """Tells whether a function computes of values of a partition what this alone has.

    It was made without knowing who has what it is given.
    """
    if getattr(graph, "_smp_places", None):
        return False
    owners = [_owner(each) for each in graph.outputs]
    if any(each is not None and each.partition not in partitions for each in owners):
        return False
    if any(
        _is_handle(outside)
        and ((owner := _owner(outside)) is None or owner.partition not in partitions)
        for outside, _ in graph.captures
    ):
        return False
    return not _leaves(graph)


def _leaves(graph: Any) -> bool:
    if not hasattr(graph, "_smp_leaves"):
        kinds = {operation.type for operation in graph.get_operations()}
        graph._smp_leaves = any(each in _FAILING or operations.leaves(each) for each in kinds)
    return bool(graph._smp_leaves)
