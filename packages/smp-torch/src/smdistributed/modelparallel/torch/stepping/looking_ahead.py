"""Answering questions about activations ahead of a step.

All ranks of the pipeline have come to the same question of the same microbatch. They compute what
comes before it; the rank that has what is asked about finds the answer, and all take it. What is
computed is kept for the next question of the microbatch.

A module that keeps state has to find what earlier microbatches leave. So what these compute up to
their last call of such a module comes first, as far as it was not computed for their own questions.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.record.failure import Failure
from smdistributed.modelparallel.torch.record.ir import Graph, NodeKind
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.questions.ahead import depends_on_values
from smdistributed.modelparallel.torch.record.questions.question import Before, Question
from smdistributed.modelparallel.torch.record.trace.tree import Entry, Trace
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import Call
from smdistributed.modelparallel.torch.stepping.computed_ahead import (
    ComputedAhead,
    Given,
    Together,
)
from smdistributed.modelparallel.torch.stepping.moves import Moves, numbers_seen
from smdistributed.modelparallel.torch.stepping.question_plans import QuestionPlans, Ready
from smdistributed.modelparallel.torch.stepping.state_ahead import StateAhead
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

#: Returns what the first calls of a microbatch that has run compute, for a place that needs it.
ComputedBefore = Callable[[Sequence[Entry], Trace, str], Before]


@dataclass
class _Earlier:
    """A microbatch whose Python has run.

    Attributes:
        trace: that has its calls.
        call: its arguments.
        passed: what it leaves behind.
        num_seen: of its calls, those that were computed for later microbatches.
    """

    trace: Trace
    call: Call
    passed: Passed
    num_seen: int = 0

    @property
    def moves(self) -> Moves:
        """What it changes."""
        assert self.passed.way is not None
        return Moves.of(self.passed.way)


class StepAhead:
    """What is computed ahead of one call of a step function.

    Args:
        runtime: the state of the library in this process.
        plans: of what comes before questions.
        is_possible: what modules exchange with others is exchanged by these in a step alone.
    """

    def __init__(self, runtime: TorchRuntime, plans: QuestionPlans, *, is_possible: bool) -> None:
        self.runtime = runtime
        self.plans = plans
        self.is_possible = is_possible
        self._earlier: list[_Earlier] = []
        self._together = Together(runtime, shares=True)
        self._start()

    def _start(self) -> None:
        """Begins with what modules keep before the step."""
        self._state = StateAhead()
        self._calls: collections.Counter[tuple[str, int]] = collections.Counter()
        self._computed: list[ComputedAhead] = []
        for each in self._earlier:
            each.num_seen = 0

    def microbatch(self, before: ComputedBefore) -> LookingAhead:
        """Returns what answers the questions of the next microbatch.

        Args:
            before: returns what calls of microbatches that have run compute.
        """
        return LookingAhead(self, len(self._earlier), before)

    def computed(self, microbatch: int) -> ComputedAhead:
        """Returns what is computed in a microbatch."""
        for number in range(len(self._computed), microbatch + 1):
            self._computed.append(
                ComputedAhead(self.runtime, number, self._together, self._state, self._calls)
            )
        return self._computed[microbatch]

    def note(self, trace: Trace, call: Call, passed: Passed) -> None:
        """Takes note of a microbatch whose Python has run."""
        self._earlier.append(_Earlier(trace, call, passed))
        # The calls are others when the partition is decided.
        goes_on = passed.way is not None and self._earlier[-1].moves.state
        if len(self._computed) == len(self._earlier) and not goes_on:
            self._computed[-1].let_go()

    def numbers_seen(self, graph: Graph, where: str) -> list[int]:
        """See ``moves.numbers_seen``."""
        return numbers_seen([each.moves for each in self._earlier], graph, where)

    def catch_up(self, numbers: Sequence[int], where: str, before: ComputedBefore) -> None:
        """Computes the first calls of earlier microbatches. Collective: PP_GROUP.

        Args:
            numbers: how many of each.
            where: who asks, for messages.
            before: returns what they compute.

        Raises:
            Exception: of a module, or why they cannot be computed.
        """
        missing = [
            position
            for position, (number, each) in enumerate(zip(numbers, self._earlier, strict=True))
            if number > each.num_seen
        ]
        if missing and self._is_too_late(missing):
            self._start()
            missing = [position for position, number in enumerate(numbers) if number]
        for position in missing:
            self._compute(position, numbers[position], where, before)
        for each in self._computed[: len(numbers)]:
            each.let_go()

    def _is_too_late(self, missing: Sequence[int]) -> bool:
        """Whether something was computed that should have come after what is missing."""
        known = self._computed
        return any(each.num_done for each in known[missing[0] + 1 :]) or any(
            known[position].is_over for position in missing if position < len(known)
        )

    def _compute(self, position: int, number: int, where: str, before: ComputedBefore) -> None:
        earlier, known = self._earlier[position], self._earlier[position].moves.before
        try:
            if number not in known:
                known[number] = before(earlier.moves.calls[:number], earlier.trace, where)
            ready = self.plans.ready(known[number], (), where, placed=True)
            constants = earlier.passed.constants.tensors(known[number].graph.constants)
        except Exception as error:
            self.compare("", error)
            raise
        self.compare(ready.digest)
        computed = self.computed(position)
        parts = self.plans.parts(ready, computed.num_done, placed=True)
        given = Given(tensors_in(earlier.call), constants, where)
        computed.go_on(parts, ready.num_nodes, given)
        earlier.num_seen = number

    def compare(
        self, digest: str, error: Exception | None = None, numbers: Sequence[int] = ()
    ) -> list[int]:
        """Makes sure that all ranks compute the same. Collective: PP_GROUP.

        Args:
            digest: says what this one computes.
            error: why it cannot.
            numbers: of calls of earlier microbatches.

        Returns:
            the largest numbers of all ranks: one may know of state that another does not see.

        Raises:
            SMPError: they do not, or one has failed.
            Exception: the error of this one.
        """
        failure = None if error is None else Failure.of(error)
        everyones = self._together.tell((digest, failure, list(numbers)))
        for _, each, _ in everyones:
            if each is not None:
                raise each.error()
        if len({(each, len(theirs)) for each, _, theirs in everyones}) > 1:
            raise SMPError(
                "the ranks of the pipeline ask different questions about activations, or ask them "
                "after different computations. Every rank must run the same code with the same "
                "settings."
            )
        return list(map(max, *(theirs for _, _, theirs in everyones)))


class LookingAhead:
    """Answers the questions of one microbatch; see ``LookAhead``.

    Args:
        step: what is computed ahead of the step.
        microbatch: its number in the step.
        before: returns what calls of microbatches that have run compute.
    """

    def __init__(self, step: StepAhead, microbatch: int, before: ComputedBefore) -> None:
        self._step = step
        self._microbatch = microbatch
        self._before = before
        alone = Together(step.runtime, shares=False)
        #: What this rank computes alone, of models that have no partition.
        self._alone = ComputedAhead(
            step.runtime, microbatch, alone, StateAhead(), collections.Counter()
        )

    @property
    def is_possible(self) -> bool:
        """See ``LookAhead``."""
        return self._step.is_possible

    def is_shared(self, question: Question) -> bool:
        """See ``LookAhead``.

        Raises:
            UnsupportedError: some of the models that it depends on have their partitions.
        """
        assert question.before is not None
        read = {
            node.target if node.kind is NodeKind.LEAF else node.target[0]
            for node in question.before.graph.nodes
            if node.kind in (NodeKind.LEAF, NodeKind.ATTRIBUTE)
        }
        placed = {
            model.holder.partitioned
            for model in models_of(self._step.runtime)
            if not read.isdisjoint(model.holder.fakes.names)
        }
        if len(placed) > 1:
            raise depends_on_values(question.where, "one of its models has no partition yet")
        return placed == {True}

    def answer(self, question: Question, given: Mapping[int, torch.Tensor]) -> Any:
        """Returns the answer to a question. Collective if it is shared: PP_GROUP.

        Raises:
            SMPError: the ranks ask different questions, or one has failed before.
            Exception: of a module, or of the question.
        """
        is_shared = self.is_shared(question)
        ready = self._begin(question) if is_shared else self._ready(question, placed=False)
        computed = self._step.computed(self._microbatch) if is_shared else self._alone
        everything = _given(question, given)
        parts = self._step.plans.parts(ready, computed.num_done, placed=is_shared)
        computed.go_on(parts, ready.num_nodes, everything)
        with computed.together.failing() as found:
            tensors = computed.run(ready.last, everything)
            if tensors is not None:
                found.append(question.answer_of(tensors))
        return computed.together.agreed(found, ready.last.nodes.rank)

    def _ready(self, question: Question, *, placed: bool) -> Ready:
        before = question.before
        assert before is not None
        return self._step.plans.ready(before, question.asked, question.where, placed=placed)

    def _begin(self, question: Question) -> Ready:
        """Returns what comes before a question, when earlier microbatches are where they must be.

        Raises:
            Exception: what has failed, here or elsewhere.
        """
        step = self._step
        assert question.before is not None
        try:
            ready = self._ready(question, placed=True)
            numbers = step.numbers_seen(question.before.graph, question.where)
        except Exception as error:
            step.compare("", error)
            raise
        step.catch_up(step.compare(ready.digest, None, numbers), question.where, self._before)
        return ready


def _given(question: Question, given: Mapping[int, torch.Tensor]) -> Given:
    """Returns what the microbatch of a question is given."""
    constants = range(question.num_inputs, question.num_inputs + len(question.constants))
    inputs = map(given.__getitem__, range(question.num_inputs))
    return Given(list(inputs), list(map(given.__getitem__, constants)), question.where)
