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
class _Failure:
    """An exception of rank 0: pickled, or its text where it cannot be."""

    pickled: bytes | None
    text: str

    @staticmethod
    def of(error: Exception) -> _Failure:
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # whatever a class of the user's does when it is pickled
            return _Failure(None, f"{type(error).__name__}: {error}")
        return _Failure(pickled, str(error))

    def error(self) -> Exception:
        if self.pickled is None:
            return SMPError(f"the first rank of the pipeline failed: {self.text}")
        found: Exception = pickle.loads(self.pickled)
        return found


def say(communicator: Communicator, compute: Callable[[], Any]) -> Any:
    """Computes a value on rank 0 of the pipeline and tells the others. Pairs with ``hear``."""
    try:
        value = compute()
    except Exception as error:
        communicator.from_first(_Failure.of(error), CommGroup.PP_GROUP)
        raise
    communicator.from_first(value, CommGroup.PP_GROUP)
    return value


def hear(communicator: Communicator) -> Any:
    """Returns what rank 0 of the pipeline says; raises what it raised. Pairs with ``say``."""
    value = communicator.from_first(None, CommGroup.PP_GROUP)
    if isinstance(value, _Failure):
        raise value.error()
    return value


class Heard:
    """What rank 0 of the pipeline says, heard once: when it is first asked for."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._is_heard = False
        self._value: Any = None
        self._error: Exception | None = None

    def __call__(self) -> Any:
        """Returns it; raises what rank 0 raised."""
        if not self._is_heard:
            self._is_heard = True
            try:
                self._value = hear(self._communicator)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._value
