"""Which parameters of other ranks have gradients after a step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.absence.tensors import hide_gradients
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.preparing import Prepared

#: Number of a model, and a name in it.
_Names = frozenset[tuple[int, str]]


class AbsentGradients:
    """Lets scripts see which parameters of other partitions have gradients.

    What a plan gives gradients to is the same each time; the ranks tell each other once.

    Args:
        runtime: the state of the library in this process.
    """

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self._known: weakref.WeakKeyDictionary[Prepared, _Names] = weakref.WeakKeyDictionary()
        self._before: _Names = frozenset()

    def begin(self, prepared: Prepared, models: Sequence[DistributedModel]) -> None:
        """Notes what has gradients before a step."""
        hide_gradients(False)
        if prepared not in self._known:
            self._before = _with_gradients(models)

    def end(self, prepared: Prepared, models: Sequence[DistributedModel]) -> None:
        """Gives absent parameters their gradients. Collective: PP_GROUP, the first times."""
        if not models:
            return
        names = self._known.get(prepared)
        if names is None:
            mine = _with_gradients(models), bool(self._before)
            everyones = self._runtime.communicator.allgather(mine, CommGroup.PP_GROUP)
            names = frozenset[tuple[int, str]]().union(*(found for found, _ in everyones))
            if not any(had_some for _, had_some in everyones):
                self._known[prepared] = names
        for model in models:
            model.holder.note_gradients({name for number, name in names if number == model.number})


def _with_gradients(models: Sequence[DistributedModel]) -> _Names:
    return frozenset(
        (model.number, name)
        for model in models
        for name, parameter in model.local_named_parameters()
        if parameter.grad is not None
    )
