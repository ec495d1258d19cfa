"""Questions that the user's Python asks about data while it is recorded on fakes.

A branch on a mask, the length of a selection, a comparison of a random number: the answer decides
what is recorded. Where the question concerns the step's inputs and random numbers alone, it is
found from these. A question about an activation (is the loss finite?) keeps what comes before it in
its microbatch: ranks compute that ahead of the step, and put back what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.layers import GIVING_SIZES
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode, past_recording
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.replicated import evaluate_replicated, sources
from smdistributed.modelparallel.torch.record.trace.tree import Constant
from smdistributed.modelparallel.torch.tensors.functions import SELECTING
from smdistributed.modelparallel.torch.tensors.nested import (
    equal,
    fill,
    map_tensors,
    opaque_objects,
    placeholders,
    template,
    tensors_in,
)

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.record.trace.tree import Entry
    from smdistributed.modelparallel.torch.record.trace.values import Values


class _Shape(NamedTuple):
    """Stands in an answer for a tensor: its shape depends on data."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> _Shape:
        return _Shape(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")


class _Sizes(NamedTuple):
    """Stands in an answer for a tensor of sizes, which functions read on the host."""

    numbers: Any
    dtype: torch.dtype


@dataclass
class Before:
    """What a microbatch computes before a question about an activation.

    Attributes:
        graph: of it, the question's own nodes at its end.
        num_nodes: of the others.
        ready: to run; None while it never was.
    """

    graph: Graph
    num_nodes: int
    ready: Any = None


@dataclass(frozen=True)
class Question:
    """A call of a torch function whose result depends on data.

    Attributes:
        function: the function.
        args, kwargs: templates of its arguments.
        where: who asks, for messages.
        all_constants: that were read before.
        num_inputs: tensor arguments of the microbatch.
        before: about an activation: what its microbatch computes before it; else None.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    where: str
    all_constants: tuple[Constant, ...]
    num_inputs: int
    before: Before | None = None

    @staticmethod
    def of(entry: Entry, values: Values, where: str, before: Before | None = None) -> Question:
        """Returns the question that a call asks."""
        return Question(
            entry.target,
            values.arguments(entry.args),
            values.arguments(entry.kwargs),
            where,
            tuple(values.graph.constants),
            values.num_inputs,
            before,
        )

    @cached_property
    def _asked_of(self) -> Any:
        if self.function in SELECTING and not self.args[0].replicated:
            # What is selected is an activation, but how much, the mask says.
            return (_zeros_like(self.args[0]), *self.args[1:])
        return self.args

    @cached_property
    def _sources(self) -> list[Node]:
        return sources(placeholders((self._asked_of, self.kwargs), Value))

    @cached_property
    def constants(self) -> dict[int, Constant]:
        """What it depends on besides the arguments of the microbatch, by position behind them."""
        if self.before is not None:
            return dict(enumerate(self.before.graph.constants, self.num_inputs))
        return {
            node.target: self.all_constants[node.target - self.num_inputs]
            for node in self._sources
            if node.kind is NodeKind.CONSTANT and isinstance(node.target, int)
        }

    @property
    def can_be_answered(self) -> bool:
        """Whether it concerns the step's inputs and random numbers alone."""
        return all(
            node.replicated or (node.kind is NodeKind.CALL and node.target is not None)
            for node in self._sources
        )

    def answer(
        self,
        inputs: Mapping[int, torch.Tensor],
        drawing: Callable[..., Any],
        attribute: Callable[[nn.Module, str], Any],
    ) -> Any:
        """Finds the answer.

        Args:
            inputs: the real tensor arguments of this microbatch and the constants, by position.
            drawing: seeds the generators for a draw.
            attribute: returns the real buffer of a module.
        """
        with past_recording():
            return evaluate_replicated(
                self._ask, self._asked_of, self.kwargs, inputs, drawing, attribute
            )

    @property
    def asked(self) -> list[Value]:
        """The tensors that it is about."""
        return list(dict.fromkeys(placeholders((self.args, self.kwargs), Value)))

    def answer_of(self, tensors: Mapping[Value, torch.Tensor]) -> Any:
        """Finds the answer, given the tensors that it is about."""
        args, kwargs = fill((self.args, self.kwargs), Value, tensors.__getitem__)
        return self._ask(*args, **kwargs)

    def _ask(self, *args: Any, **kwargs: Any) -> Any:
        """Asks it.

        Raises:
            UnsupportedError: it writes to a tensor: an answer is found apart from the step.
        """
        given = tensors_in((args, kwargs))
        versions = list(map(version_of, given))
        result = self.function(*args, **kwargs)
        if opaque_objects(result):
            # An array may lie in the memory of a buffer, which the step is to write to.
            args, kwargs = map_tensors((args, kwargs), _copy)
            result = self.function(*args, **kwargs)
        if versions != list(map(version_of, given)):
            raise UnsupportedError(
                f"{self.where} gives what depends on data, and writes it to a tensor (out=, say), "
                "in a step that is recorded before values exist: use what it returns, or keep the "
                "call inside one module."
            )
        return template(result, self._answered, lambda obj: obj)

    def _answered(self, tensor: torch.Tensor) -> _Shape | _Sizes:
        shape = _Shape.of(tensor)
        if self.function not in GIVING_SIZES or not shape.is_on_host or tensor.is_floating_point():
            return shape
        return _Sizes(_tuple(tensor.tolist()), tensor.dtype)

    def result(self, answer: Any, mode: FakeTensorMode, device: torch.device) -> Any:
        """Returns what the function gives on fakes, tensors in the shapes of the answer."""
        needs_grad = torch.is_grad_enabled() and any(
            value.requires_grad for value in placeholders((self.args, self.kwargs), Value)
        )

        def make(shape: _Shape) -> torch.Tensor:
            place = "cpu" if shape.is_on_host else device
            made = torch.empty(shape.sizes, dtype=shape.dtype, device=place)
            if needs_grad and made.is_floating_point():
                return made.requires_grad_().clone()
            return made

        with past_recording():
            answer = fill(answer, _Sizes, lambda each: torch.tensor(each.numbers, dtype=each.dtype))
        with mode:
            return fill(answer, _Shape, make)


def same_answer(one: Any, other: Any) -> bool:
    """Whether two answers lead the same way."""
    return equal(one, other, lambda a, b: a is b or (isinstance(a, (_Shape, _Sizes)) and a == b))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tuple(numbers: Any) -> Any:
    return tuple(map(_tuple, numbers)) if isinstance(numbers, list) else numbers


def _zeros_like(value: Value) -> torch.Tensor:
    with past_recording():
        return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
