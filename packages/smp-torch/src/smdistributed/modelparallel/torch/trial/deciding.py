"""Modules that decide by their input: whether a call changed only what the recording knows of.

Stand-ins have no numbers, so a module that asks for some was tried on a few kinds of them. What it
changes for others is found when it happens. By then the Python around it has run, and so may have
other microbatches: the step may not be that of one process, and ends with an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import past_function_modes
from smdistributed.modelparallel.torch.state.reach import OF_MODULES
from smdistributed.modelparallel.torch.state.snapshot import Change, Snapshot


class known_changes:  # noqa: N801 - reads as a function
    """Stands around the calls of a module, and tells if one changes what no trial has shown.

    Args:
        name: of the module.
        module: it decides by its input.
        known: the modules in it, with the names of what they are known to change.
        is_last: its calls are those of one process, in order, and no backward pass follows: only
            code outside could be mistaken, and a warning is enough.

    Raises:
        UnsupportedError: the call has changed something else.
    """

    def __init__(
        self, name: str, module: nn.Module, known: Mapping[nn.Module, set[str]], *, is_last: bool
    ) -> None:
        self._name = name
        self._module = module
        self._known = known
        self._is_last = is_last
        self._before: Snapshot | None = None

    def __enter__(self) -> None:
        with past_function_modes():
            self._begin()

    def _begin(self) -> None:
        # It costs more to look at everything than to see that nothing has changed since.
        if self._before is None or self._before.note_changes():
            own = self._module.parameters()
            shards = {id(each) for each in own if type(each) is not nn.Parameter}
            self._before = Snapshot(self._module.modules(), moved=shards)

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None or self._before is None:
            return
        with past_function_modes():
            changes = self._before.note_changes()
        unknown = [each for each in changes if not self._is_known(each)]
        if changes:
            self._before = None
        if not unknown:
            return
        told = (
            f"{self._name} changed {unknown[0].path} for the numbers of this microbatch, and did "
            "not for those that it was tried on when the step was recorded. What reads it outside "
            "has done so already. Assign it in every call, also where it stays as it is, so that "
            "it is known; or keep it out of the forward pass."
        )
        if not self._is_last:
            raise UnsupportedError(told)
        warnings.warn(told, stacklevel=2)

    def _is_known(self, change: Change) -> bool:
        owner = change.owner
        if owner is None:
            # Of shared state only logs are accepted when a step is recorded.
            return change.added is not None
        names = self._known.get(owner.module, set())
        if owner.attribute in ("_parameters", "_buffers"):
            tensors = vars(owner.module)[owner.attribute]
            return bool(names & tensors.keys())
        return owner.attribute in names or owner.attribute in OF_MODULES
