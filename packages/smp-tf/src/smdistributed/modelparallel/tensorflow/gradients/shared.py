"""Numbers of a whole model, where a script makes them of the variables of its process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import functions, resources
from smdistributed.modelparallel.tensorflow.compat.gradients import unrecorded, with_gradient
from smdistributed.modelparallel.tensorflow.compat.operations import (
    is_unnoted,
    operations_noted,
    stands_for,
    unnoted,
)
from smdistributed.modelparallel.tensorflow.gradients.combining import (
    ABOUT,
    ADDING,
    NO_NUMBERS,
    PARTIAL,
    Operation,
    of_results,
    refusal,
    refuse_none,
)
from smdistributed.modelparallel.tensorflow.gradients.meeting import begin_function, of_partitions
from smdistributed.modelparallel.tensorflow.gradients.telling import Told
from smdistributed.modelparallel.tensorflow.parameters.shares import (
    Family,
    Form,
    Share,
    merged,
    note,
    of_same,
    share_of,
)
from smdistributed.modelparallel.tensorflow.record.tracing import tensors_in
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime

_OVER_PARTITIONS = {
    Form.SUM: tf.reduce_sum,
    Form.MOST: tf.reduce_max,
    Form.LEAST: tf.reduce_min,
}
#: What may have other gradients by own variables where a process has others as well.
_OTHERWISE = (Form.SOME, Form.MOST, Form.LEAST)
_WRITING = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})


def followed(runtime: TFRuntime) -> AbstractContextManager[None]:
    """Within, sums over the variables of a process are those of the model. See ``combining``."""
    following = _Following(runtime)
    return operations_noted(
        following.eagerly,
        following.in_graph,
        lambda graph: begin_function(runtime, graph),
        following.called,
        following.differentiated,
        following.read,
        refuse_none,
    )


class _Following:
    """Follows what is computed of variables in this process.

    Args:
        runtime: of this process.
    """

    def __init__(self, runtime: TFRuntime) -> None:
        self._runtime = runtime
        self._told = Told()

    def eagerly(self, kind: str, args: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Follows an operation that was computed; returns its results, or those of the model."""
        shares = _plainly(args)
        if shares == []:
            return results
        if shares is not None and kind in _WRITING:
            _write(kind, args[0], share_of(args[0]), share_of(args[1]))
            return results
        if shares is not None and _is_passed_on(kind, shares, results):
            first = shares[0]
            is_one = all(each is first for each in shares)
            share = first.of_value if is_one else of_same(*shares)
            for result in results:
                if result.dtype not in NO_NUMBERS:
                    note(result, share)
            return results
        with unnoted():
            inputs = _inputs(kind, args)
            return self._followed(kind, inputs, [share_of(each) for each in inputs], results)

    def in_graph(self, kind: str, args: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Follows an operation that a graph got."""
        shares = [_in_graph(each) for each in args]
        if not any(shares):
            return results
        with unnoted():
            return self._followed(kind, args, shares, results)

    def called(self, graph: Any, args: Sequence[Any], results: Sequence[Any]) -> None:
        """Follows a call of a function, whose graph was followed when it was made."""
        with unnoted():
            captured = {id(inside) for _, inside in graph.captures}
            given = {
                id(inside): _in_graph(each)
                for inside, each in zip(graph.inputs, args, strict=False)
                if id(inside) not in captured and each.dtype != tf.resource
            }
            if any(each is not None for each in given.values()):
                _walk(graph, given)
            for result, inside in zip(results, graph.outputs, strict=False):
                note(result, given.get(id(inside)) or share_of(inside))

    def differentiated(
        self, targets: Sequence[Any], sources: Sequence[Any], gradients: Sequence[Any]
    ) -> None:
        """Notes which variables gradients are of, and which were asked for together.

        Raises:
            UnsupportedError: they would be others if one process had all variables.
        """
        some = [each for each in map(_in_graph, targets) if each and each.form in _OTHERWISE]
        if some := [each for each in some if not each.is_linear]:
            raise refusal(some)
        if sources and all(each is None for each in gradients):
            self._runtime.has_asked_in_vain = True
        pairs = [
            (gradient, share)
            for source, gradient in zip(sources, gradients, strict=True)
            if gradient is not None and (share := _in_graph(source)) is not None
        ]
        if not pairs:
            return
        every = merged([share for _, share in pairs], Form.OWN)
        (known, *_) = every.families
        family = Family(lambda: every.variables, known.name_of, is_of_gradients=True)
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            graph._smp_families = [*getattr(graph, "_smp_families", []), family]
        for gradient, share in pairs:
            for tensor in tensors_in(gradient):
                if tensor.dtype.is_floating:
                    note(tensor, replace(share.of_value, families=frozenset([family])))

    def read(self, tensor: Any) -> None:
        """Refuses to tell Python the numbers of what one process would have more of."""
        share = share_of(tensor)
        if share is None:
            return
        if share.form in (*PARTIAL, Form.SOME):
            raise refusal([share])
        self._told.note(share)

    def _followed(
        self,
        kind: str,
        inputs: Sequence[Any],
        shares: Sequence[Share | None],
        results: Sequence[Any],
    ) -> Sequence[Any]:
        if kind in _WRITING:
            _write(kind, inputs[0], *shares[:2])
            return results
        found = _of_branches(kind, results, shares) or of_results(
            Operation(kind, inputs, shares, results)
        )
        share = found[0] if found else None
        if share is not None and share.form in PARTIAL and share.is_complete:
            if not all(family.is_even for family in share.counted):
                raise refusal([share])
            total = self._whole(kind, inputs, share, results[0])
            note(total, merged([share], Form.WHOLE))
            return [total, *results[1:]]
        if share is not None and share.form in PARTIAL and kind == "Mean":
            found = [merged([share], Form.SOME, made_by=kind)]
        for result, each in zip(results, found, strict=True):
            if each is not None:
                note(result, each)
        return results

    def _whole(self, kind: str, inputs: Sequence[Any], share: Share, own: Any) -> Any:
        """Returns the number of the whole model, given that of this process, which it stands for.

        It is differentiated by what it was computed of here, without what stands for missing
        variables.
        """
        row = inputs[0]
        if share.padding:
            row = row[: row.shape[0] - share.padding]
        part = _reduced(kind, row) if share.pure is None else share.pure
        part = tf.reshape(part, [])  # of one number, with dimensions or without
        with unrecorded():
            every, counts = of_partitions(self._runtime, [part, tf.size(row)])
            total = _OVER_PARTITIONS[share.form](every)
        total = _differentiated(part, tf.cast(total, part.dtype), every, share.form)
        if kind == "Mean":
            total = total / tf.cast(tf.reduce_sum(counts), total.dtype)
        if share.base is not None:
            total = total + tf.cast(share.base, total.dtype)
        total = tf.reshape(total, own.shape)
        stands_for(total, own)
        return total


def _differentiated(part: Any, total: Any, every: Any, form: Form) -> Any:
    """Returns a number of all partitions such that its gradient is that of the own part."""
    if not part.dtype.is_floating:
        return total

    def gradient(of_part: Any, of_total: Any) -> list[Any]:
        if of_total is not None and form is not Form.SUM:
            are = tf.cast(tf.cast(every, part.dtype) == total, part.dtype)
            of_total = of_total * tf.cast(part == total, part.dtype) / tf.reduce_sum(are)
        given = [each for each in (of_part, of_total) if each is not None]
        return [tf.add_n(given) if given else None, None]

    return with_gradient([part, total], gradient, "SmpWhole")[1]


def _plainly(args: Sequence[Any]) -> list[Share] | None:
    """Returns what is known of the arguments of an operation; None if some are in a list."""
    shares = []
    for each in args:
        share = share_of(each)
        if share is not None:
            shares.append(share)
        elif isinstance(each, (list, tuple)) and _has_share(each):
            return None
    return shares


def _is_passed_on(kind: str, shares: Sequence[Share], results: Sequence[Any]) -> bool:
    """Tells whether results are of the one variable that all arguments are of; in a moment.

    Optimizers do little else.
    """
    first = shares[0]
    if kind in ABOUT or not first.is_plain or results[0] is None:
        return False
    if kind in ADDING and results[0].shape.rank == 0:
        return False
    return all(
        each is first or (each.is_plain and each.variables == first.variables) for each in shares
    )


def _has_share(values: Sequence[Any]) -> bool:
    return any(share_of(each) is not None for each in values)


def _inputs(kind: str, args: Sequence[Any]) -> list[Any]:
    """Returns the inputs of an eager operation, without its attributes."""
    found: list[Any] = []
    for each in args:
        if isinstance(each, str):
            break
        if isinstance(each, (list, tuple)) and _has_share(each):
            found += (
                each
                if kind in ("AddN", "Pack", "ConcatV2", "IdentityN") or len(args) == 1
                else [_packed(each)]
            )
        else:
            found.append(each)
    return found


def _packed(values: Sequence[Any]) -> Any:
    """Returns a list as the tensor that TensorFlow makes of it by itself."""
    row = tf.stack(values)
    (share,) = of_results(Operation("Pack", values, [share_of(each) for each in values], [row]))
    note(row, share)
    return row


def _in_graph(tensor: Any) -> Share | None:
    """Returns what is known of a tensor, also of one that a function takes from around it."""
    share = share_of(tensor)
    is_symbolic = tf.is_tensor(tensor) and not isinstance(tensor, tf.__internal__.EagerTensor)
    if share is None and is_symbolic and tensor.op.type == "Placeholder":
        share = share_of(resources.origin(tensor.graph, tensor))
        note(tensor, share)
    return share


def _write(kind: str, handle: Any, to: Share | None, share: Share | None = None) -> None:
    """Notes what a variable of the script is written with.

    Raises:
        UnsupportedError: it is of several variables of this process.
    """
    if share is None:
        if kind == "AssignVariableOp" and to is not None and not to.is_variable:
            note(handle, None)
        return
    if share.form in (*PARTIAL, Form.SOME):
        if not share.is_of_one:
            raise refusal([share])
        share = merged([share], Form.OWN)  # such as a number added to a slot that was zero
    if not tf.executing_eagerly() and not isinstance(handle, tf.__internal__.EagerTensor):
        handle = resources.origin(handle.graph, handle)
    is_model = to is not None and to.is_variable
    if is_model or share.form is Form.WHOLE:
        return
    if kind != "AssignVariableOp" and to is not None and to.variables != share.variables:
        raise refusal([to, share])
    note(handle, share.kept)


def _of_branches(
    kind: str, results: Sequence[Any], shares: Sequence[Share | None]
) -> list[Share | None] | None:
    """Returns what is known of the results of a branch or a loop; None for other operations.

    Their functions were followed when they were made, with what they take from around them.
    """
    if kind not in ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"):
        return None
    if not results or not hasattr(results[0], "op"):
        return [None] * len(results)
    operation = results[0].op
    known = [each for each in shares if each is not None and each.form in (*PARTIAL, Form.SOME)]
    if known and len(known) < len(list(filter(None, shares))):
        raise refusal(known)
    graphs = [
        functions.own_graph(operation.graph, name) for name in functions.called(operation.node_def)
    ]
    if kind.endswith("While"):
        graphs = [each for each in graphs if len(each.outputs) == len(results)]
    found: list[Share | None] = []
    for place in range(len(results)):
        those = [share_of(each.outputs[place]) for each in graphs if place < len(each.outputs)]
        if kind.endswith("While"):
            those.append(shares[place])
        known = [each for each in those if each is not None]
        found.append(merged(known, known[0].form) if known else None)
    return found


def _walk(graph: Any, given: dict[int, Share | None]) -> None:
    """Follows a function that was made without knowing of its arguments.

    Args:
        graph: of the function.
        given: what is known of its tensors, by ``id``; what is found is added.

    Raises:
        UnsupportedError: it puts values of several arguments together.
    """
    for operation in graph.get_operations():
        inputs = list(operation.inputs)
        if is_unnoted(operation) or not any(given.get(id(each)) for each in inputs):
            continue
        shares = [given.get(id(each)) or share_of(each) for each in inputs]
        if operation.type in _WRITING:
            _write(operation.type, inputs[0], *shares[:2])
            continue
        names = functions.called(operation.node_def)
        if names:
            _walk_nested(operation, names, shares, given)
            continue
        results = list(operation.outputs)
        for result, each in zip(
            results, of_results(Operation(operation.type, inputs, shares, results)), strict=True
        ):
            if each is not None and each.form in PARTIAL:
                is_linear = each.form is Form.SUM
                each = merged([each], Form.SOME, made_by=operation.type, is_linear=is_linear)
            given[id(result)] = each


def _walk_nested(
    operation: Any, names: Sequence[str], shares: Sequence[Share | None], given: dict[int, Any]
) -> None:
    """Follows the functions that an operation of a function calls."""
    for name in names:
        inner = functions.own_graph(operation.graph, name)
        first = len(shares) - len(inner.inputs)
        inside = {
            id(each): share
            for each, share in zip(inner.inputs, shares[max(first, 0) :], strict=False)
        }
        _walk(inner, inside)
        for result, each in zip(operation.outputs, inner.outputs, strict=False):
            given[id(result)] = given.get(id(result)) or inside.get(id(each)) or share_of(each)


def _reduced(kind: str, numbers: Any) -> Any:
    """Returns what an operation makes of a row, of which a mean is a sum at first."""
    return {
        "Sum": tf.reduce_sum,
        "Mean": tf.reduce_sum,
        "L2Loss": tf.nn.l2_loss,
        "Max": tf.reduce_max,
        "Min": tf.reduce_min,
        "Any": tf.reduce_any,
        "All": tf.reduce_all,
    }[kind](numbers)
