"""Answers to questions that the user's Python asks about data while it is recorded.

A branch on a mask, say, needs the values of the step's inputs, and only the first rank of a
pipeline has the right ones. It answers and keeps its answers; the other ranks ask in the same
order, since they record the same code, and take those.

A question about an activation no rank answers alone: parameters that it depends on are on several.
All ranks come to it at the same place, and compute what comes before it together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.record.failure import Failure
from smdistributed.modelparallel.torch.record.questions.question import Question

#: Tensor arguments of a microbatch by position, and behind them what it reads besides.
Given = Mapping[int, torch.Tensor]


class Decisions(Protocol):
    """Who answers."""

    def answer(self, compute: Callable[[], Any], where: str) -> Any:
        """Returns the answer to the next question.

        Args:
            compute: finds it from the real inputs.
            where: who asks, for messages.
        """

    @property
    def can_look_ahead(self) -> bool:
        """Whether questions about activations are answered."""

    def look_ahead(self, question: Question, given: Given) -> Any:
        """Returns the answer to the next question, one about activations.

        Args:
            question: the question.
            given: what the microbatch is given, as far as this rank has it.
        """


class LookAhead(Protocol):
    """Computes, ahead of the step, what questions about activations depend on."""

    def is_shared(self, question: Question) -> bool:
        """Whether all ranks of the pipeline take part; else the first one has all that it needs."""

    @property
    def is_possible(self) -> bool:
        """Whether it can be done."""

    def answer(self, question: Question, given: Given) -> Any:
        """Returns the answer to a question. Collective if it is shared: PP_GROUP."""


class OwnDecisions:
    """Answers from this process's inputs, and keeps the answers.

    Args:
        ahead: answers questions about activations; None: nobody does.
        begin: has the other ranks come to the first question of the microbatch that all answer.
        tell: tells them of each one that comes after it: whether all answer it, and else the
            answer.
        begun: they are told of all questions: they have begun with the microbatch.
    """

    def __init__(
        self,
        ahead: LookAhead | None = None,
        begin: Callable[[], None] = lambda: None,
        tell: Callable[[bool, Any], None] = lambda of_all, answer: None,
        *,
        begun: bool = False,
    ) -> None:
        self.answers: list[Any] = []
        self._ahead = ahead
        self._begin = begin
        self._tell = tell
        self._is_shared = begun

    def answer(self, compute: Callable[[], Any], where: str) -> Any:
        """See ``Decisions``."""
        try:
            answer = compute()
        except Exception as error:
            self._keep(Failure.of(error))
            raise
        self._keep(answer)
        return answer

    def _keep(self, answer: Any) -> None:
        self.answers.append(answer)
        if self._is_shared:
            self._tell(False, answer)

    @property
    def can_look_ahead(self) -> bool:
        """See ``Decisions``."""
        return self._ahead is not None and self._ahead.is_possible

    def look_ahead(self, question: Question, given: Given) -> Any:
        """See ``Decisions``."""
        assert self._ahead is not None
        ahead = self._ahead
        if not ahead.is_shared(question):
            return self.answer(lambda: ahead.answer(question, given), question.where)
        if self._is_shared:
            self._tell(True, None)
        else:
            self._begin()
            self._is_shared = True
        return ahead.answer(question, given)


class GivenDecisions:
    """Repeats answers of another recording.

    Args:
        receive: gives the answers; called at the first question.
        ahead: answers questions about activations.
        hear: tells of a question that comes after one that all ranks have answered: whether all
            answer it, and else the answer; None if the other recording asks no such question.
        join: takes note that this rank answers with the others.
        begun: the other recording has begun with this one, so all questions are heard.
    """

    def __init__(
        self,
        receive: Callable[[], Sequence[Any]],
        ahead: LookAhead | None = None,
        hear: Callable[[], tuple[bool, Any]] | None = None,
        join: Callable[[], None] = lambda: None,
        *,
        begun: bool = False,
    ) -> None:
        self._receive = receive
        self._ahead = ahead
        self._hear = hear
        self._join = join
        self._answers: Sequence[Any] | None = None
        self._asked = 0
        self._is_shared = begun

    @property
    def answers(self) -> Sequence[Any]:
        """All answers."""
        if self._answers is None:
            self._answers = self._receive()
        return self._answers

    def answer(self, compute: Callable[[], Any], where: str) -> Any:
        """See ``Decisions``.

        Raises:
            SMPError: the other recording asked less often.
            Exception: the question had no answer there, for this reason.
        """
        if self._is_shared and self._hear is not None:
            of_all, answer = self._hear()
            if of_all:
                _refuse(where)
        else:
            self._asked += 1
            if self._asked > len(self.answers):
                _refuse(where)
            answer = self.answers[self._asked - 1]
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    @property
    def can_look_ahead(self) -> bool:
        """See ``Decisions``."""
        return self._ahead is not None and self._ahead.is_possible

    def look_ahead(self, question: Question, given: Given) -> Any:
        """See ``Decisions``.

        Raises:
            SMPError: the other recording does not ask it.
        """
        assert self._ahead is not None
        if not self._ahead.is_shared(question):
            return self.answer(lambda: None, question.where)
        if self._hear is None or self._asked < len(self.answers):
            _refuse(question.where)
        if self._is_shared and not self._hear()[0]:
            _refuse(question.where)
        self._is_shared = True
        self._join()
        return self._ahead.answer(question, given)


def _refuse(where: str) -> NoReturn:
    raise SMPError(
        f"{where} makes a decision here that the first rank of the pipeline did not make: "
        "every rank must run the same code with the same settings."
    )
