"""What rank 0 of a pipeline tells the others: a value, or why it has none.

A step that is refused must be refused on every rank: a rank that went on waiting would take the
next message for an answer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.groups import CommGroup


@dataclass(frozen=True)
class Failure:
    """An exception of rank 0: pickled, or its text where it cannot be."""

    pickled: bytes | None
    text: str

    @staticmethod
    def of(error: Exception) -> Failure:
        """Returns what tells of an error."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # whatever a class of the user's does when it is pickled
            return Failure(None, f"{type(error).__name__}: {error}")
        return Failure(pickled, str(error))

    def error(self) -> Exception:
        """Returns the error."""
        if self.pickled is None:
            return SMPError(f"the first rank of the pipeline failed: {self.text}")
        found: Exception = pickle.loads(self.pickled)
        return found


def say(communicator: Communicator, compute: Callable[[], Any]) -> Any:
    """Computes a value on rank 0 of the pipeline and tells the others. Pairs with ``hear``."""
    try:
        value = compute()
    except Exception as error:
        communicator.from_first(Failure.of(error), CommGroup.PP_GROUP)
        raise
    communicator.from_first(value, CommGroup.PP_GROUP)
    return value


def hear(communicator: Communicator) -> Any:
    """Returns what rank 0 of the pipeline says; raises what it raised. Pairs with ``say``."""
    value = communicator.from_first(None, CommGroup.PP_GROUP)
    if isinstance(value, Failure):
        raise value.error()
    return value
