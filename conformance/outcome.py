"""What became of a case."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How a case, or a row, stands."""

    PASSED = "passed"
    NO_EFFECT = "accepted, without effect"
    FAILED = "failed"
    NOT_BUILT = "not yet built"
    NOT_INSTALLED = "not installed"
    NO_CASE = "no case"


@dataclass(frozen=True)
class Outcome:
    """A case in one world, on one rank or on all.

    Attributes:
        status: how it stands.
        reason: the traceback of a failure, what refused, or what is not installed.
    """

    status: Status
    reason: str = ""


def worst(outcomes: list[Outcome]) -> Outcome:
    """Returns the outcome of a whole: that of the part which is farthest from having passed."""
    for status in (Status.FAILED, Status.NOT_BUILT, Status.NOT_INSTALLED, Status.PASSED):
        for each in outcomes:
            if each.status is status:
                return each
    return Outcome(Status.NO_CASE)
