"""Which tensors see the same memory."""

from __future__ import annotations

import contextlib
import gc
import weakref

import torch
from torch import nn

from smdistributed.modelparallel.torch.absence.owned import OwnedTensor
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.compat.private.tensors import (
    storage_of,
    users_of_memory,
)


class MemorySharers:
    """Finds all tensors that see the memory of one, such as a parameter and its ``.data``.

    Only the garbage collector knows them; what it has found once is kept.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns a tensor and those that share its memory; None if some cannot be found."""
        number_of_users = users_of_memory(tensor)
        found = self._found(tensor)
        if len(found) != number_of_users:
            self._look()
            found = self._found(tensor)
        return found if len(found) == number_of_users else None

    def _found(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        number = storage_of(tensor)
        found = {id(tensor): tensor}
        for reference in self._known.get(number, ()):
            each = reference()
            if each is not None and _is_plain(each) and storage_of(each) == number:
                found[id(each)] = each
        return list(found.values())

    def _look(self) -> None:
        self._known = {}
        for each in gc.get_objects():
            # Not isinstance: objects can answer that with code of their own.
            if not issubclass(type(each), torch.Tensor):
                continue
            # A tensor that a transform of torch.func wraps has no memory of its own.
            with contextlib.suppress(NotImplementedError, RuntimeError):
                self._note(each)

    def _note(self, each: torch.Tensor) -> None:
        if _is_plain(each):
            self._known.setdefault(storage_of(each), []).append(weakref.ref(each))


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, nn.Parameter, OwnedTensor)
    if type(tensor) not in kinds:
        return False
    with past_subclass_functions():
        # One of delayed parameters has no memory yet, and becomes another tensor when it gets some.
        return tensor.layout is torch.strided and not tensor.is_meta
