"""How the arguments of a step function are cut into microbatches.

Tensors are cut along the batch axis of their argument into contiguous parts, also inside the
containers that results are taken apart in; an object with ``smp_slice`` cuts itself; everything
else reaches every microbatch whole, unless it holds tensors as long as the batch, which is an
error. A batch that does not divide is cut into parts whose sizes differ by at most one, the larger
ones first, and the weights say what share of the batch each microbatch holds, so that weighted
means equal those of the whole batch. A smaller batch than there are microbatches, such as the last
one of an epoch, has one microbatch for each example where an engine runs as many as there are.

Every check is made here, before any communication.

Source: smd_model_parallel_common_api.rst, The Library's Core APIs;
model-parallel-customize-tips-pitfalls.md, Batch Size and Number of Microbatches.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from smdistributed.modelparallel.common.containers import Container, attributes_of
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.walk import Survey, Walk

#: Most of what stays whole; it holds nothing.
_PLAIN = (int, float, complex, str, bytes, type(None), type, types.FunctionType)


class Tensors(Protocol):
    """What a framework tells about its tensors, and about what holds them."""

    @property
    def knows_shapes(self) -> bool:
        """Whether ``shape`` is that of the tensors."""

    def is_tensor(self, value: object) -> bool:
        """Whether ``value`` is a tensor of the framework."""

    def shape(self, value: Any) -> Sequence[int]:
        """The shape of a tensor."""

    def narrow(self, value: Any, axis: int, start: int, length: int) -> Any:
        """The part of a tensor from ``start``, ``length`` long along ``axis``."""

    def take_apart(self, value: object) -> Container | None:
        """The parts of a container; None for everything else."""

    def is_state(self, value: object) -> bool:
        """Whether the tensors that ``value`` holds are no examples: a model, an optimizer."""


@dataclass(frozen=True)
class SplitRules:
    """Which arguments of a function are split, and where; checked when it is decorated.

    Args:
        signature: signature of the step function, see `signature_of`.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis by argument name; 0 for all others.

    Raises:
        ConfigError: a name is no argument of the function, stands in both, or an axis is no int.
    """

    signature: inspect.Signature
    non_split_inputs: Iterable[str] = ()
    input_split_axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.non_split_inputs, str):
            raise ConfigError(
                "non_split_inputs must be a list of argument names: write "
                f"[{self.non_split_inputs!r}], got {self.non_split_inputs!r}."
            )
        if not isinstance(self.non_split_inputs, Iterable) or not all(
            isinstance(name, str) for name in self.non_split_inputs
        ):
            raise ConfigError(
                "non_split_inputs must be a list of argument names, such as ['mask'], got "
                f"{self.non_split_inputs!r}."
            )
        if not isinstance(self.input_split_axes, Mapping):
            raise ConfigError(
                "input_split_axes must be a dict from argument names to axes, such as "
                f"{{'x': 1}}, got {self.input_split_axes!r}."
            )
        object.__setattr__(self, "non_split_inputs", frozenset(self.non_split_inputs))
        object.__setattr__(self, "input_split_axes", dict(self.input_split_axes))
        problems = [
            *self._find_unknown("non_split_inputs", self.non_split_inputs),
            *self._find_unknown("input_split_axes", self.input_split_axes),
        ]
        for name in sorted(set(self.non_split_inputs) & set(self.input_split_axes)):
            problems.append(
                f"{name} is both in non_split_inputs and in input_split_axes: keep one of them."
            )
        for name, axis in self.input_split_axes.items():
            if not isinstance(axis, int) or isinstance(axis, bool):
                problems.append(f"input_split_axes[{name!r}] must be an int, got {axis!r}.")
        if problems:
            raise ConfigError("\n".join(problems))

    def axis(self, *names: str) -> int | None:
        """Batch axis of an argument, known by any of the names; None when it stays whole."""
        if not set(names).isdisjoint(self.non_split_inputs):
            return None
        return next((self.input_split_axes[n] for n in names if n in self.input_split_axes), 0)

    def _find_unknown(self, option: str, names: Iterable[str]) -> list[str]:
        parameters = self.signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return []  # any name may be an argument
        return [
            f"{option} names {name!r}, which is no argument of the step function: use some of "
            f"{', '.join(parameters) or 'none, it has no arguments'}."
            for name in sorted(names)
            if name not in parameters
        ]


class Microbatches(NamedTuple):
    """The calls that replace one call of a step function.

    Attributes:
        calls: positional and keyword arguments of each microbatch.
        weights: share of the batch that each microbatch holds; their sum is 1.
    """

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    weights: tuple[float, ...]


def check_function(function: object) -> None:
    """Check that a step function can be one.

    Raises:
        ConfigError: it cannot be called, or a call would only prepare the work.
    """
    if not callable(function):
        raise ConfigError(
            f"a step function must be a function, got {function!r}: put smp.step above a def, its "
            "options by keyword."
        )
    kinds = {
        "a generator": inspect.isgeneratorfunction,
        "a coroutine": inspect.iscoroutinefunction,
        "an asynchronous generator": inspect.isasyncgenfunction,
    }
    for kind, is_one in kinds.items():
        if is_one(function):
            raise ConfigError(
                f"a step function must return its results, got {kind} "
                f"({getattr(function, '__qualname__', function)}), of which a call computes "
                "nothing: return a list in place of yield or await."
            )


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """The signature of a function; one that takes anything where Python does not know it."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)


def bind_arguments(
    signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> inspect.BoundArguments:
    """Give each argument of a call the name that the signature has for it.

    Raises:
        TypeError: the call does not fit the signature.
    """
    return signature.bind(*args, **kwargs)


def in_order(
    signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in the order of the signature, as `split_arguments` leaves them.

    Raises:
        TypeError: the call does not fit the signature.
    """
    bound = bind_arguments(signature, args, kwargs)
    return bound.args, bound.kwargs


def split_sizes(batch: int, microbatches: int) -> list[int]:
    """Sizes of the microbatches of a batch: they differ by at most one, larger ones first."""
    size, larger = divmod(batch, microbatches)
    return [size + 1] * larger + [size] * (microbatches - larger)


def split_arguments(
    tensors: Tensors,
    rules: SplitRules,
    microbatches: int,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Microbatches:
    """Cut the arguments of one call into those of its microbatches.

    A batch with fewer examples than microbatches has one microbatch for each of them.

    Args:
        tensors: the framework's tensors.
        rules: of the step function that is called.
        microbatches: number of microbatches.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        ConfigError: a split tensor lacks its axis, batch sizes differ, or the batch is empty.
        TypeError: the call does not fit the signature.
    """
    bound = bind_arguments(rules.signature, args, kwargs)
    batch, microbatches = _find_batch(tensors, rules, bound, microbatches)
    sizes = split_sizes(batch or microbatches, microbatches)
    calls = []
    for index in range(microbatches):
        part = partial(_cut, tensors, sizes, index)
        walk = Walk(partial(_is_leaf, tensors), tensors.take_apart, part)
        calls.append(_replace_parts(walk, rules, bound))
    return Microbatches(calls, tuple(size / sum(sizes) for size in sizes))


def tensors_to_cut(
    tensors: Tensors, rules: SplitRules, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, tuple[Any, int]]:
    """The tensors of a call that are cut, with their batch axes, by what messages call them.

    Args:
        tensors: the framework's tensors.
        rules: of the step function that is called.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    found: dict[str, tuple[Any, int]] = {}

    def note(value: Any, label: str, axis: int) -> Any:
        if tensors.is_tensor(value):
            found[label] = value, _positive(axis, tensors.shape(value))
        return value

    walk = Walk(partial(_is_leaf, tensors), tensors.take_apart, note)
    _replace_parts(walk, rules, bind_arguments(rules.signature, args, kwargs))
    return found


def argument_of(label: str) -> str:
    """The name of the argument in which something is that a label names."""
    return label.partition("[")[0].partition(".")[0]


def change_tensors(
    tensors: Tensors,
    rules: SplitRules,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    change: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with each tensor changed that is split, or is an argument itself.

    Args:
        tensors: the framework's tensors.
        rules: of the step function that is called.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        change: what takes the place of a tensor.

    Raises:
        TypeError: the call does not fit the signature.
    """

    def part(value: Any, label: str = "", axis: int = 0) -> Any:
        return change(value) if tensors.is_tensor(value) else value

    walk = Walk(partial(_is_leaf, tensors), tensors.take_apart, part)
    return _replace_parts(walk, rules, bind_arguments(rules.signature, args, kwargs), part)


def _cut(
    tensors: Tensors, sizes: Sequence[int], index: int, value: Any, label: str, axis: int
) -> Any:
    """The part of one value that belongs to microbatch ``index``."""
    if not _slices_itself(value):
        start = sum(sizes[:index])
        return tensors.narrow(value, _positive(axis, tensors.shape(value)), start, sizes[index])
    try:
        return value.smp_slice(len(sizes), index, axis)
    except Exception as error:
        error.add_note(f"raised by smp_slice of step argument {label}")
        raise


def _find_batch(
    tensors: Tensors,
    rules: SplitRules,
    bound: inspect.BoundArguments,
    microbatches: int,
) -> tuple[int | None, int]:
    """The one batch size of all split tensors, None without any, and how many microbatches."""
    found: dict[str, tuple[int, int]] = {}

    def measure(value: Any, label: str, axis: int) -> Any:
        if _slices_itself(value):
            return value  # only the object knows its size
        shape = tuple(tensors.shape(value))
        if not -len(shape) <= axis < len(shape):
            raise ConfigError(
                f"step argument {label} of shape {shape} has no axis {axis} to be split along: "
                "give its batch axis in input_split_axes, or name it in non_split_inputs."
            )
        found[label] = (_positive(axis, shape), shape[axis])
        return value

    survey = Survey(partial(_is_leaf, tensors), tensors.take_apart, measure)
    _replace_parts(survey, rules, bound)
    batch = _agreed_size(found, survey.lists)
    if batch == 0:
        raise ConfigError(
            f"the batch is empty: {_listed(found)}. Fix: drop it, or name arguments without a "
            "batch axis in non_split_inputs."
        )
    if batch is not None:
        microbatches = min(batch, microbatches)
    if microbatches > 1 and tensors.knows_shapes:
        _check_lists(batch, survey.lists, rules)
        for label, (value, axis) in survey.others.items():
            _check_whole(tensors, batch, value, label, axis)
    return batch, microbatches


def _agreed_size(found: Mapping[str, tuple[int, int]], lists: Mapping[str, int]) -> int | None:
    """The batch size of split tensors, of which (axis, size) was found by label."""
    if not found:
        return None
    batch = next(iter(found.values()))[1]
    if any(size != batch for _, size in found.values()):
        hints = "".join(
            f" If {label} has one entry an example, give an object with smp_slice in its place."
            for label in lists
        )
        raise ConfigError(
            f"all split arguments of a step must have the same batch size; got {_listed(found)}. "
            "Name those without a batch axis in non_split_inputs, and other axes than 0 in "
            f"input_split_axes.{hints}"
        )
    return batch


def _listed(found: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{label} has {size} along axis {a}" for label, (a, size) in found.items())


def _check_lists(batch: int | None, lists: Mapping[str, int], rules: SplitRules) -> None:
    """Raises if a list may have an entry for each example, whose own tensors would be cut."""
    for label, length in lists.items():
        name = argument_of(label)
        if length == batch and name not in rules.input_split_axes:
            raise ConfigError(
                f"step argument {label} has {length} entries, as many as the batch has examples, "
                f"and the tensors in each have {length} along their batch axis as well: it cannot "
                "be told which of both are examples. If the entries are, give an object with "
                "smp_slice in its place; if the tensors are to be cut, say so by "
                f"input_split_axes={{{name!r}: 0}}; if it is to stay whole, name {name} in "
                "non_split_inputs."
            )


def _check_whole(tensors: Tensors, batch: int | None, value: object, label: str, axis: int) -> None:
    """Raises if an object that nothing can cut holds tensors as long as the batch, or the batch."""
    if isinstance(value, _PLAIN) or tensors.is_state(value):
        return

    def check(tensor: Any, attribute: str, axis: int) -> Any:
        shape = () if tensors.is_state(tensor) else tuple(tensors.shape(tensor))
        if -len(shape) <= axis < len(shape) and batch in (None, shape[axis]):
            kind = type(value).__qualname__
            raise ConfigError(
                f"step argument {label} is a {kind}, which the library cannot take apart, and "
                f"{attribute}, of shape {shape}, looks like examples that are to be split: give "
                f"{kind} a method smp_slice, use one of Python's containers or a data class, or "
                f"name {argument_of(label)} in non_split_inputs, so that every microbatch gets it "
                "whole."
            )
        return tensor

    held: dict[Any, Any] = attributes_of(value)
    if isinstance(value, ValuesView | ItemsView):
        held = dict(enumerate(value))
    Walk(tensors.is_tensor, tensors.take_apart, check).replace(held, "what it holds", axis)


def _replace_parts(
    walk: Walk,
    rules: SplitRules,
    bound: inspect.BoundArguments,
    whole: Callable[[Any], Any] = lambda value: value,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call as a walk leaves them, and ``whole`` those that are not split."""

    def replace(value: object, label: str, *names: str) -> object:
        axis = rules.axis(*names)
        return whole(value) if axis is None else walk.replace(value, label, axis)

    replaced: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match bound.signature.parameters[name].kind:
            case inspect.Parameter.VAR_KEYWORD:
                replaced[name] = {key: replace(item, key, key, name) for key, item in value.items()}
            case inspect.Parameter.VAR_POSITIONAL:
                replaced[name] = tuple(
                    replace(item, f"{name}[{place}]", name) for place, item in enumerate(value)
                )
            case _:
                replaced[name] = replace(value, name, name)
    result = inspect.BoundArguments(bound.signature, replaced)
    return result.args, result.kwargs


def _is_leaf(tensors: Tensors, value: object) -> bool:
    return _slices_itself(value) or tensors.is_tensor(value)


def _slices_itself(value: object) -> bool:
    # Asked of the class: a model that forwards unknown attributes must not answer for its wrapper.
    return hasattr(type(value), "smp_slice")


def _positive(axis: int, shape: Sequence[int]) -> int:
    return axis % len(shape)
