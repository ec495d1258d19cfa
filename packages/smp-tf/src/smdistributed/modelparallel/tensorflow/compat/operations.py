"""Every operation that Python asks TensorFlow for, eagerly or for a graph, as it is made.

TensorFlow's own callbacks (``op_callbacks``) cannot give an eager operation another result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import execute, imperative_grad
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import constant_op, op_def_library, op_def_registry, ops
from tensorflow.python.ops import gradients_util

from smdistributed.modelparallel.tensorflow.compat.autograph import not_converted, pass_through
from smdistributed.modelparallel.tensorflow.compat.buffers import buffers_refused
from smdistributed.modelparallel.tensorflow.compat.gradients import reaching
from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced
from smdistributed.modelparallel.tensorflow.compat.variables import VARIABLES


class Again(NamedTuple):
    """How an eager operation is made.

    Attributes:
        make: takes arguments; returns its results.
        args: of which it was made.
    """

    make: Callable[[Sequence[Any]], Any]
    args: Sequence[Any]


class Follower(Protocol):
    """What sees operations, calls and reads, and may change what they are given."""

    def before(self, kind: str, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Takes the type and the arguments of an operation: tensors, lists of them, and others.

        Returns:
            arguments in their place, and what ``after`` is to know.
        """

    def after(self, kind: str, known: Any, results: Sequence[Any], again: Again | None) -> None:
        """Takes the results of an operation, and how an eager one is made."""

    def call(self, graph: Any, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Takes the graph of a function, and the tensors that it is called with; as ``before``."""

    def called(self, graph: Any, known: Any, results: Sequence[Any]) -> None:
        """Takes the results of a function."""

    def differentiated(
        self, sources: Sequence[Any], gradients: Sequence[Any], reached: Any, watched: Any
    ) -> list[Any]:
        """Takes gradients that were asked for, whose operations nobody sees; returns them."""

    def is_owned(self, tensor: Any) -> bool:
        """Takes an eager tensor; tells whether its memory says nothing to NumPy and to graphs."""

    def numbers(self, tensor: Any) -> Any:
        """Takes an eager tensor whose numbers Python asks for; returns others, or None."""

    def packed(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Takes a list of which TensorFlow makes an eager tensor by itself; as ``before``."""

    def assigned(self, variable: Any, value: Any) -> Any:
        """Takes a variable that is to be written; returns what to write."""


_is_unnoted: ContextVar[bool] = ContextVar("is_unnoted", default=False)


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Within, operations are made as if nobody looked."""
    token = _is_unnoted.set(True)
    try:
        yield
    finally:
        _is_unnoted.reset(token)


def is_unnoted() -> bool:
    """Tells whether nobody looks at what is made."""
    return _is_unnoted.get()


@functools.cache
def leaves(kind: str) -> bool:
    """Tells whether what an operation is given leaves TensorFlow: as text, or to Python."""
    if "PyFunc" in kind or kind.startswith("Write"):
        return True
    definition = op_def_registry.get(kind)
    if definition is None or any(
        each.type == types_pb2.DT_RESOURCE for each in definition.input_arg
    ):
        return False
    return all(each.type == types_pb2.DT_STRING for each in definition.output_arg)


@contextlib.contextmanager
def operations_noted(follower: Follower) -> Iterator[None]:
    """Within, a follower sees what is made, called and read, in the whole process."""

    def fast(original: Any) -> Any:
        def run(context: Any, kind: str, name: Any, *args: Any) -> Any:
            if _is_unnoted.get():
                return original(context, kind, name, *args)
            given, known = follower.before(kind, args)
            if known is None:
                result = original(context, kind, name, *given)
                follower.after(kind, None, _listed(result), None)
                return result

            def make(args: Sequence[Any]) -> Any:
                return original(context, kind, name, *_packed(kind, args))

            result = make(given)
            follower.after(kind, known, _listed(result), Again(make, given))
            return result

        return run

    def slow(original: Any) -> Any:
        def run(kind: Any, num_outputs: int, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_unnoted.get() or not isinstance(kind, bytes):  # the name of a function
                return original(kind, num_outputs, inputs, *args, **kwargs)
            given, known = follower.before(kind.decode(), inputs)

            def make(inputs: Sequence[Any]) -> Any:
                return original(kind, num_outputs, inputs, *args, **kwargs)

            result = make(given)
            follower.after(kind.decode(), known, _listed(result), Again(make, given))
            return result

        return run

    def adding(original: Any) -> Any:
        def run(kind: str, name: Any = None, **keywords: Any) -> Any:
            if _is_unnoted.get():
                return original(kind, name, **keywords)
            with _passing_through():
                given, known = follower.before(kind, list(keywords.values()))
            made = original(kind, name, **dict(zip(keywords, given, strict=True)))
            with _passing_through():
                follower.after(kind, known, made[2].outputs, None)
            return made

        return run

    def calling(original: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            graph = self._cached_graph  # None where it would have to be made of a definition
            if _is_unnoted.get() or graph is None:
                return original(self, *args)
            with _passing_through():
                given, known = follower.call(graph, args)
            results = original(self, *given)
            follower.called(graph, known, results or ())
            return results

        return run

    def differentiating(targets: str, sources: str, tape: str = "") -> Any:
        def make(original: Any) -> Any:
            place = inspect.signature(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                if _is_unnoted.get():
                    return original(*args, **kwargs)
                given = place.bind(*args, **kwargs).arguments
                with unnoted(), reaching() as reached:
                    results = original(*args, **kwargs)
                    watched = _watched_by(given[tape]) if tape else None
                    return follower.differentiated(
                        _listed(given[sources]), results, reached, watched
                    )

            return run

        return make

    def reading(original: Any) -> Any:
        def run(self: Any) -> Any:
            numbers = None if _is_unnoted.get() else follower.numbers(self)
            return original(self) if numbers is None else numbers

        return run

    def capturing(original: Any) -> Any:
        """Returns what makes a constant of a small tensor that a graph takes, but of some."""

        def capture(self: Any, name: Any) -> Any:
            return None if follower.is_owned(self) else original(self, name)

        return capture

    def packing(original: Any) -> Any:
        def run(value: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_unnoted.get() or not isinstance(value, (list, tuple)):
                return original(value, *args, **kwargs)
            given, known = follower.packed(value)
            if known is not None:
                with unnoted():
                    given = _stacked(given)
            result = original(given, *args, **kwargs)
            follower.after("Pack", known, [result], None)
            return result

        return run

    def assigning(original: Any) -> Any:
        def run(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_unnoted.get():
                value = follower.assigned(self, value)
            return original(self, value, *args, **kwargs)

        return not_converted(run)

    with (
        buffers_refused(lambda each: not _is_unnoted.get() and follower.is_owned(each)),
        replaced(
            [
                Replacement(pywrap_tfe, "TFE_Py_FastPathExecute", fast),
                Replacement(execute, "execute", slow),
                Replacement(op_def_library, "_apply_op_helper", adding),
                Replacement(atomic_function.AtomicFunction, "call_flat", calling),
                Replacement(
                    imperative_grad, "imperative_grad", differentiating("target", "sources", "tape")
                ),
                Replacement(gradients_util, "_GradientsHelper", differentiating("ys", "xs")),
                Replacement(ops._EagerTensorBase, "_numpy", reading),
                Replacement(ops._EagerTensorBase, "_capture_as_const", capturing),
                Replacement(constant_op, "convert_to_eager_tensor", packing),
                *(
                    Replacement(kind, name, assigning)
                    for kind in VARIABLES
                    for name in ("assign", "assign_add", "assign_sub")
                    if name in vars(kind)
                ),
            ]
        ),
    ):
        yield


@contextlib.contextmanager
def _passing_through() -> Iterator[None]:
    """Within, errors are those of a follower, which AutoGraph leaves as they are."""
    try:
        yield
    except Exception as error:
        pass_through(error)
        raise


@functools.cache
def _lists_of(kind: str) -> frozenset[int]:
    """Returns the places of the arguments of an operation that are lists of tensors."""
    definition = op_def_registry.get(kind)
    inputs = [] if definition is None else definition.input_arg
    return frozenset(n for n, each in enumerate(inputs) if each.number_attr or each.type_list_attr)


def _packed(kind: str, args: Sequence[Any]) -> Sequence[Any]:
    """Returns arguments with lists as the tensors that TensorFlow makes of them by itself."""
    lists = _lists_of(kind)
    with unnoted():
        return [
            _stacked(each) if place not in lists and _has_tensors(each) else each
            for place, each in enumerate(args)
        ]


def _has_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        _has_tensors(each) or isinstance(each, ops.EagerTensor) for each in value
    )


def _stacked(value: Any) -> Any:
    """Returns a list of tensors, or of lists of them, as a tensor."""
    return tf.stack([_stacked(each) for each in value]) if _has_tensors(value) else value


def _watched_by(tape: Any) -> set[int]:
    return {id(each) for each in tape.watched_variables()}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
