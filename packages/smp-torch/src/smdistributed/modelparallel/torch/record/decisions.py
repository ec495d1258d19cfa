"""Answers to questions that the user's Python asks about data while it is recorded.

A branch on a mask, say, needs the values of the step's inputs, and only the first rank of a
pipeline has the right ones. It answers and keeps its answers; the other ranks ask in the same
order, since they record the same code, and take those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.record.failure import Failure


class Decisions(Protocol):
    """Who answers."""

    def answer(self, compute: Callable[[], Any], where: str) -> Any:
        """Returns the answer to the next question.

        Args:
            compute: finds it from the real inputs.
            where: who asks, for messages.
        """


class OwnDecisions:
    """Answers from this process's inputs, and keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def answer(self, compute: Callable[[], Any], where: str) -> Any:
        """See ``Decisions``."""
        try:
            self.answers.append(compute())
        except Exception as error:
            self.answers.append(Failure.of(error))
            raise
        return self.answers[-1]


class GivenDecisions:
    """Repeats answers of another recording.

    Args:
        receive: gives the answers; called at the first question.
    """

    def __init__(self, receive: Callable[[], Sequence[Any]]) -> None:
        self._receive = receive
        self._answers: Sequence[Any] | None = None
        self._asked = 0

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
        self._asked += 1
        if self._asked > len(self.answers):
            raise SMPError(
                f"{where} makes a decision here that the first rank of the pipeline did not make: "
                "every rank must run the same code with the same settings."
            )
        answer = self.answers[self._asked - 1]
        if isinstance(answer, Failure):
            raise answer.error()
        return answer
