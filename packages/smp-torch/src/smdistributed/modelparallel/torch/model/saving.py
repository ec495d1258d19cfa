"""What ``save_pretrained`` writes of a model that several ranks hold: the state of the whole.

The user's own model has ``save_pretrained``, which asks that model for its ``state_dict()``. On
each rank that is a part, or stands for the whole without its memory. Where it is for a file it is
what ``state_dict()`` of the DistributedModel returns, in the form of the modules that were
replaced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.model.absence import is_for_whole

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model.distributed import DistributedModel

#: What ranks that come without the others are told.
_PURPOSE = (
    "the state of a model for save_pretrained or generate, which every rank calls: not inside "
    "'if smp.rank() == 0', but with is_main_process=smp.rank() == 0"
)


class WholeState:
    """Has the state of a user's model be that of the whole where it is for a file.

    Args:
        model: the DistributedModel of it.
        communicator: between the ranks.
    """

    def __init__(self, model: DistributedModel, communicator: Communicator) -> None:
        self._model = weakref.ref(model)
        self._communicator = communicator
        self._reading = contextlib.ExitStack()
        self._is_reading = False

    def watch(self, module: nn.Module) -> None:
        """Watches a model."""
        module.register_state_dict_pre_hook(_Hook(self.begin))  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(_Hook(self.end))  # type: ignore[no-untyped-call]

    def begin(self, module: nn.Module, prefix: str, _: object) -> None:
        """Waits for all ranks to come to this call, and has what is here read. Collective: WORLD.

        Raises:
            CommError: they do not.
        """
        if (model := self._asked(module, prefix)) is not None:
            self._communicator.allgather(None, CommGroup.WORLD, _PURPOSE)
            self._is_reading = True
            self._reading.enter_context(model.parameters_awake())
            self._reading.enter_context(model.holder.as_blocks())
            self._reading.enter_context(model.holder.absence.past())

    def end(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Puts the whole in the place of what is here. Collective: WORLD."""
        model = self._model()
        if model is not None and self._is_reading and not prefix and module is model.get_module():
            self.close()
            whole = model.state_dict()
            state.clear()
            state.update(model.translation.to_theirs(whole) if model.translation else whole)

    def close(self) -> None:
        """Ends what a call has begun; one that has failed does not."""
        self._is_reading = False
        self._reading.close()

    def _asked(self, module: nn.Module, prefix: str) -> DistributedModel | None:
        """Returns the model if the whole of it is wanted, and is not what its module gives."""
        model = self._model()
        if model is None or prefix or module is not model.get_module():  # a copy has the hook, too
            return None
        is_apart = model.holder.is_split and not model.holder.absence.is_read
        return model if is_apart and is_for_whole() else None


class _Hook:
    """A hook that stays behind where its module is copied or pickled."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> _Hook:
    return _Hook(lambda *_: None)
