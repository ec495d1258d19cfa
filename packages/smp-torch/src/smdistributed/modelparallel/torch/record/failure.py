"""An exception that travels: what rank 0 of a pipeline raised, for the others to raise too."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from smdistributed.modelparallel.common.errors import SMPError


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
