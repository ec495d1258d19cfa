"""Questions about activations: what is computed for an answer before the step has begun.

``assert torch.isfinite(loss)``, the checks of ``torch.distributions``, ``pack_padded_sequence``,
an early exit: the answer decides what Python does next, and no rank has computed anything yet. What
the microbatch has called before the question is a graph like that of a step; it is computed without
gradients, under the random numbers of the pass to come, and what it changes is put back. The step
then computes it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    function_modes_left,
    past_dispatch_modes,
)
from smdistributed.modelparallel.torch.record.ir import Graph, NodeKind
from smdistributed.modelparallel.torch.record.questions.question import Before, Question
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind, Seen
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.tensors.nested import placeholders

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.record.calls.known import KnownCalls
    from smdistributed.modelparallel.torch.record.leaves.attributes import LeafAttributes
    from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
    from smdistributed.modelparallel.torch.record.trace.values import Values


def number_in(tensor: torch.Tensor) -> bool | int | float:
    """Returns the number in a tensor: asked where Python cannot wait for what ``item`` gave."""
    return tensor.item()


class Ahead:
    """Asks questions about activations in one microbatch.

    Args:
        context: of the recorder.
        now: the microbatch.
        known: calls that the trace has.
        make: makes a new call of a torch function; see ``NewCalls.make``.
        attributes: of the leaves.
    """

    def __init__(
        self,
        context: Context,
        now: Microbatch,
        known: KnownCalls,
        make: Callable[[Any, str, Callable[..., Any], Any, Any], Any],
        attributes: LeafAttributes,
    ) -> None:
        self._context = context
        self._now = now
        self._known = known
        self._make = make
        self._attributes = attributes

    def question(self, entry: Entry, where: str) -> Question:
        """Returns the question that a call asks.

        Raises:
            UnsupportedError: it cannot be answered.
        """
        if self._is_inside() or not self._now.decisions.can_look_ahead:
            raise depends_on_values(where)
        return question_ahead(entry, self._now.log, self._now.new_values(), where)

    def _is_inside(self) -> bool:
        """Whether a module asks that is whole, or will be: it runs with its values."""
        module = self._context.calls.current.module
        if self._context.state.leaf_depth or module is None:
            return bool(self._context.state.leaf_depth)
        return self._context.scene.runs_with_values(module)

    def answer(self, question: Question, given: Mapping[int, torch.Tensor]) -> Any:
        """Returns the answer to a question.

        Args:
            question: the question.
            given: what the microbatch is given, as far as this rank has it.
        """
        with self._for_real():
            return self._now.decisions.look_ahead(question, given)

    def number(self, tensor: torch.Tensor) -> Any:
        """Returns the number in an activation, for Python that cannot wait for it."""
        given: tuple[Any, dict[str, Any]] = (tensor,), {}
        entry = self._known.match(EntryKind.CALL, number_in, *given)
        if entry is not None:
            return self._known.answer(entry, lambda: None)
        return self._make(number_in, "item", number_in, *given)

    @contextlib.contextmanager
    def _for_real(self) -> Iterator[None]:
        """In the middle of a run on fakes, lets modules compute as they will in the step."""
        context, state = self._context, self._context.state
        former, state.runs_for_real = state.runs_for_real, True
        try:
            with (
                context.calls.uncounted(),
                state.pausing(),
                function_modes_left(),
                past_dispatch_modes(),
                context.scene.real_in_place(),
                self._attributes.shown(),
                torch.no_grad(),
            ):
                yield
        finally:
            state.runs_for_real = former


def question_ahead(entry: Entry, log: Sequence[Entry], values: Values, where: str) -> Question:
    """Returns a question about activations.

    Args:
        entry: the call that asks.
        log: what came before.
        values: writes the graph of that; new.
        where: who asks, for messages.

    Raises:
        UnsupportedError: what comes before cannot be computed twice.
    """
    before = computed_before(log, values, where)
    question = Question.of(entry, values, where, before)
    if any(value.node.late for value in question.asked):
        raise depends_on_values(where, "it is a gradient, or computed from one")
    before.graph.result = question.asked
    return question


def computed_before(log: Sequence[Entry], values: Values, where: str) -> Before:
    """Returns what some calls of a microbatch compute; see ``question_ahead``."""
    for each in log:
        values.take(each)
    graph = values.graph
    graph.roots, graph.late, graph.gradients = [], [], []
    if reason := _not_twice(graph, log):
        raise depends_on_values(where, reason)
    return Before(graph, len(graph.nodes))


def _not_twice(graph: Graph, log: Sequence[Entry]) -> str:
    """Returns why something cannot be computed once more than the script says; "" if it can."""
    for entry in log:
        if entry.kind is EntryKind.LEAF and entry.seen is not Seen.NOTHING:
            return f"hooks or containers outside {entry.name} see its calls"
        if next(placeholders((entry.args, entry.kwargs), Carried), None) is not None:
            return f"{entry} is given an object with state"
    for node in graph.nodes:
        if node.target is torch.autograd.grad:
            return f"{node.name} differentiates"
        if node.kind is NodeKind.CALL and node.target is None:
            return "an unknown call made a tensor"
    return ""


def depends_on_values(where: str, reason: str = "") -> UnsupportedError:
    """Returns the error of a place that asks for what is not computed yet.

    Args:
        where: the place.
        reason: why it is not computed ahead of the step.
    """
    because = f" What comes before cannot be computed ahead: {reason}." if reason else ""
    return UnsupportedError(
        f"{where} makes Python depend on the value of an activation, or of a tensor that one "
        "partition holds (a branch, float() or a data-dependent shape). A pipelined step is "
        "recorded before values exist: keep the decision inside one module, return the tensor (or "
        "its .item()) from the step function and look at it outside, or put that module on one "
        f"partition.{because}"
    )
