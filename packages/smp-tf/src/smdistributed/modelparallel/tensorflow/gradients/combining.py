"""What operations make of values that know which variables they are of.

A value of one variable stays one, whatever is computed of it. Numbers of several variables may be
added up, or the greatest or least of them taken: such a sum is the whole model's once it has a
number of each variable on each process. Anything else that is of several variables is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat.gradients import is_recorded
from smdistributed.modelparallel.tensorflow.parameters.shares import Form, Share, merged

_JOINING = frozenset({"Pack", "ConcatV2"})
ADDING = frozenset({"AddV2", "Add", "AddN"})
_CHOOSING = {"Maximum": Form.MOST, "Minimum": Form.LEAST}
#: What makes one number of a row, and what such numbers of several processes make together.
_REDUCING = {
    **dict.fromkeys(("Sum", "L2Loss", "Mean"), Form.SUM),
    **dict.fromkeys(("Max", "Any"), Form.MOST),
    **dict.fromkeys(("Min", "All"), Form.LEAST),
}
#: What makes a number of each number, so that what is side by side stays so.
_EACH = frozenset(
    {
        *("Abs", "Add", "AddV2", "Cast", "CheckNumerics", "CheckNumericsV2", "ClipByValue", "Div"),
        *("DivNoNan", "Equal", "Exp", "Expm1", "Greater", "GreaterEqual", "Identity", "IsFinite"),
        *("IsInf", "IsNan", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot"),
        *("LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "NotEqual", "OnesLike"),
        *("Pow", "RealDiv", "Reciprocal", "Relu", "Rsqrt", "Select", "SelectV2", "Sigmoid", "Sign"),
        *("Snapshot", "Sqrt", "Square", "SquaredDifference", "StopGradient", "Sub", "Tanh"),
        "ZerosLike",
    }
)
_TAKING = frozenset(
    {
        *("ExpandDims", "Gather", "GatherV2", "Reshape", "Slice", "Split", "SplitV", "Squeeze"),
        *("StridedSlice", "Unpack"),
    }
)
_SAME = frozenset({"Identity", "Snapshot", "StopGradient", "CheckNumerics", "CheckNumericsV2"})
#: What adds numbers up. A row of numbers of variables is as long as a process has variables, so
#: that its mean is another one elsewhere.
_LINEAR = (
    ADDING | _TAKING | _SAME | {"BroadcastTo", "Cast", "IdentityN", "Mean", "Neg", "Sub", "Sum"}
)
#: What multiplies by a number, or divides the first by the second.
_SCALING = frozenset({"Div", "DivNoNan", "Mul", "RealDiv"})
#: What tells something else of a value than its numbers.
ABOUT = frozenset({"Rank", "Shape", "ShapeN", "Size", "VarIsInitializedOp", "VariableShape"})
NO_NUMBERS = (tf.string, tf.resource, tf.variant)
#: What waits for numbers of other variables.
PARTIAL = (Form.SUM, Form.MOST, Form.LEAST)


@dataclass(frozen=True)
class Operation:
    """An operation that has values of variables among its inputs.

    Attributes:
        kind: its type.
        inputs: tensors and numbers.
        shares: of each input.
        results: tensors.
    """

    kind: str
    inputs: Sequence[Any]
    shares: Sequence[Share | None]
    results: Sequence[Any]

    @property
    def known(self) -> list[Share]:
        """Shares of inputs that are of variables of this process."""
        return [each for each in self.shares if each is not None and each.form is not Form.WHOLE]

    @property
    def is_scalar(self) -> bool:
        """Whether the first result is one number."""
        return bool(self.results[0].shape.rank == 0)


def of_results(operation: Operation) -> list[Share | None]:
    """Returns what is known of each result of an operation.

    Raises:
        UnsupportedError: they are of one variable, and of others of this process as well.
    """
    results = operation.results
    numbers = [getattr(each, "dtype", tf.string) not in NO_NUMBERS for each in results]
    if not operation.known or not any(numbers) or operation.kind in ABOUT:
        return [None] * len(results)
    if len(results) > 1 and list(map(_kind, results)) == list(map(_kind, operation.inputs)):
        return list(operation.shares)  # of IdentityN, and of what reduces a list over replicas
    share = _of_numbers(operation)
    return [share if is_number else None for is_number in numbers]


def _kind(tensor: Any) -> Any:
    return getattr(tensor, "dtype", None), getattr(tensor, "shape", None)


def _of_numbers(operation: Operation) -> Share:
    kind, known = operation.kind, operation.known
    forms = {each.form for each in known}
    own = merged(known, Form.OWN)
    found = None
    if operation.is_scalar and kind in ADDING and forms <= {Form.OWN, Form.SUM}:
        found = _added(operation, own)
    elif kind in _SAME and len(known) == 1:
        found = known[0]
    elif forms == {Form.OWN} and _are_alike(known) and not _is_list_of_one(operation):
        found = own
    elif operation.is_scalar and kind in _CHOOSING and forms <= {Form.OWN, _CHOOSING[kind]}:
        found = _chosen(operation, _CHOOSING[kind])
    elif kind in _JOINING and forms == {Form.OWN}:
        found = _joined(operation)
    elif forms == {Form.OWN} and not operation.is_scalar:
        found = own  # such as a layer's result, of the variables that it names
    elif forms == {Form.JOINED} and len({(each.variables, each.padding) for each in known}) == 1:
        found = _of_joined(operation)
    elif _is_piece(operation, forms):
        found = merged(known, Form.PIECE)
    return found or _of_some(operation)


def _is_piece(operation: Operation, forms: set[Form]) -> bool:
    """Tells whether it takes numbers of a row apart, or computes with what was taken."""
    if forms == {Form.PIECE}:
        return operation.kind in _TAKING | _EACH
    is_both = forms == {Form.OWN, Form.PIECE}
    return is_both and operation.kind in _EACH and not operation.is_scalar


def _are_alike(known: Sequence[Share]) -> bool:
    """Tells whether shares are of the same variables, or of one of each model."""
    return len({each.variables for each in known}) == 1 or merged(known, Form.OWN).is_of_one


def _is_list_of_one(operation: Operation) -> bool:
    """Tells whether it makes a row of numbers, of which there may be more elsewhere."""
    return (
        operation.kind == "Pack"
        and len(operation.inputs) == 1
        and operation.results[0].shape.rank == 1
        and operation.results[0].dtype.is_floating
    )


def _of_some(operation: Operation) -> Share:
    """Returns the share of a value that is of no use but for gradients.

    Raises:
        UnsupportedError: it is to change a value of one variable.
    """
    known = operation.known
    some = [each for each in known if each.form in (*PARTIAL, Form.SOME)]
    is_added = operation.is_scalar and operation.kind in ADDING
    if some and len(some) < len(known) and not is_added:
        raise refusal(some)
    made_by = next((each.made_by for each in some if each.made_by), operation.kind)
    return merged(known, Form.SOME, made_by=made_by, is_linear=_is_linear(operation))


def _is_linear(operation: Operation) -> bool:
    """Tells whether an operation adds numbers of variables up, or multiplies one by a constant."""
    if not all(each.is_sum for each in operation.known):
        return False
    if operation.kind in _LINEAR:
        return True
    pairs = list(zip(operation.inputs, operation.shares, strict=True))
    others = pairs if operation.kind == "Mul" else pairs[1:]
    factors = [value for value, share in others if share is None]
    is_product = operation.kind in _SCALING and len(factors) == len(pairs) - 1
    return is_product and all(map(_is_constant, factors))


def _is_constant(value: Any) -> bool:
    """Tells whether nobody can ask for gradients of a number."""
    if not tf.is_tensor(value):
        return True
    is_eager = isinstance(value, tf.__internal__.EagerTensor)
    return not is_recorded(value) or (not is_eager and tf.get_static_value(value) is not None)


def _added(operation: Operation, own: Share) -> Share | None:
    """Returns the share of a sum of scalars; None if it is not known what to add up.

    What is of no variable is added once, whatever the number of processes.
    """
    pairs = list(zip(operation.inputs, operation.shares, strict=True))
    is_whole = any(each is not None and each.form is Form.WHOLE for each in operation.shares)
    is_alike = _are_alike(operation.known)
    is_added_up = len({each.is_kept for each in operation.known}) > 1
    if is_whole or (is_added_up and not is_alike):
        return None
    dtype, form = operation.results[0].dtype, Form.SUM
    # What is added to nothing is the first of several, as where a loop or ``sum`` begins, and so
    # is the only one of a list: where a script takes some, other processes may have more of them.
    is_first = len(pairs) == 1 or (pairs[0][1] is None and _is_zero(pairs[0][0]))
    if is_alike and not is_first:
        form = Form.SUM if any(each.form is Form.SUM for each in operation.known) else Form.OWN
    if form is Form.SUM and operation.kind == "AddN":
        # A list of terms, which may have numbers added to each.
        pairs = [
            (value, replace(each, pure=None, base=None) if each and each.form is Form.OWN else each)
            for value, each in pairs
        ]
    bases = [each.base for _, each in pairs if each is not None and each.base is not None]
    if form is Form.SUM and len(bases) > 1:
        return None
    bases += [value for value, each in pairs if each is None and not _is_zero(value)]
    parts = [
        value if each.pure is None else each.pure
        for value, each in pairs
        if each is not None and not each.is_padding
    ]
    if form is Form.OWN and not bases:
        return own
    return replace(
        own,
        form=form,
        pure=_sum(parts, dtype),
        base=_sum(bases, dtype) if bases else None,
    )


def _sum(parts: Sequence[Any], dtype: Any) -> Any:
    if not parts:
        return tf.zeros([], dtype)
    values = [tf.cast(each, dtype) for each in parts]
    return values[0] if len(values) == 1 else tf.add_n(values)


def _is_zero(value: Any) -> bool:
    """Tells whether a summand is known to be zero, as that with which ``sum`` begins."""
    if tf.is_tensor(value):
        value = tf.get_static_value(value)
    return isinstance(value, (int, float, np.generic, np.ndarray)) and not np.any(value)


def _chosen(operation: Operation, form: Form) -> Share | None:
    """Returns the share of the greatest or the least of two numbers of variables."""
    known = operation.known
    if len(known) < len(operation.inputs):
        return None
    own = [
        value if each.pure is None else each.pure
        for value, each in zip(operation.inputs, known, strict=True)
        if not each.is_padding
    ]
    dtype = operation.results[0].dtype
    if not own:
        pure = tf.constant(dtype.min if form is Form.MOST else dtype.max, dtype)
    else:
        pure = own[0] if len(own) == 1 else (tf.maximum if form is Form.MOST else tf.minimum)(*own)
    return merged(known, form, pure=pure)


def _joined(operation: Operation) -> Share | None:
    """Returns the share of numbers of several variables in one row, missing ones at its end."""
    values = operation.inputs[:-1] if operation.kind == "ConcatV2" else operation.inputs
    shares = operation.shares[: len(values)]
    if operation.results[0].shape.rank != 1 or None in shares:
        return None
    are_padding = [each is not None and each.is_padding for each in shares]
    if are_padding != sorted(are_padding):
        return None
    padding = sum(
        value.shape.num_elements()
        for value, is_it in zip(values, are_padding, strict=True)
        if is_it
    )
    return merged(operation.known, Form.JOINED, padding=padding)


def _of_joined(operation: Operation) -> Share | None:
    """Returns the share of what is computed of rows with the same variables side by side."""
    share, result = operation.known[0], operation.results[0]
    if operation.kind in _REDUCING and result.shape.num_elements() == 1:
        return replace(share, form=_REDUCING[operation.kind])
    if operation.kind in _EACH and result.shape.rank == 1:
        return merged(operation.known, Form.JOINED, padding=share.padding)
    if operation.kind in _TAKING:
        return merged(operation.known, Form.PIECE)
    return None


def refusal(shares: Sequence[Share]) -> UnsupportedError:
    """Returns the error of a use of values of several variables of this process."""
    share = merged(shares, Form.SOME)
    names = sorted({each.name_of(key) for each in share.families for key in share.variables} - {""})
    few = ", ".join(names[:3] or ["none"]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )
    made_by = next((f" ({each.made_by})" for each in shares if each.made_by), "")
    return UnsupportedError(
        "what is computed of several variables or gradients must be of those of all partitions; "
        f"received a value of {few}{made_by}, which are variables of this process: take a sum, the "
        "greatest or the least of one number for each of model.trainable_variables, or of the "
        "gradients by them (tf.linalg.global_norm, tf.clip_by_global_norm, tf.add_n, "
        "tf.norm(tf.stack(...)), sum()), which is the whole model's. Of some of them: give layers "
        "a kernel_regularizer, or add_loss in call, for a penalty in model.losses; call "
        "smp.clip_by_global_norm, which takes any gradients; look at model.get_weights(), which "
        "has all values."
    )


def refuse_none() -> None:
    """Raises where a list of nothing is added up, of which other processes may have something.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "tf.add_n adds up one value or more; received none in this process: of "
        "model.trainable_variables it has its own, of which a script may have taken none where "
        "other processes have some. Give the layers a kernel_regularizer, whose losses are in "
        "model.losses, or begin with a number: sum(values, tf.constant(0.0))."
    )
