"""What rank 0 of a pipeline tells the others: a value, or why it has none.

A step that is refused must be refused on every rank: a rank that went on waiting would take the
next message for an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.record.failure import Failure

_PURPOSE = "a step function"


def say(communicator: Communicator, compute: Callable[[], Any]) -> None:
    """Computes a value on rank 0 of the pipeline and tells the others. Pairs with ``hear``.

    It waits for nobody: another rank may come much later, while this one computes.
    """
    try:
        value = compute()
    except Exception as error:
        communicator.open(Failure.of(error), CommGroup.PP_GROUP, _PURPOSE)
        raise
    communicator.open(value, CommGroup.PP_GROUP, _PURPOSE)


def hear(communicator: Communicator) -> Any:
    """Returns what rank 0 of the pipeline says; raises what it raised. Pairs with ``say``."""
    value = communicator.join(CommGroup.PP_GROUP, _PURPOSE)
    if isinstance(value, Failure):
        raise value.error()
    return value
