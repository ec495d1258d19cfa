"""Between steps, what one rank of a pipeline has of a model knows so (``absence.owned``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from smdistributed.modelparallel.torch.absence.notes import Origin
from smdistributed.modelparallel.torch.absence.owned import Owned, OwnerKeeper, own_up, wake_all
from smdistributed.modelparallel.torch.record.fakes import Slot


class Ownership:
    """The tensors of one model that this rank alone of its pipeline has.

    Args:
        keeper: knows the other ranks.
        tensor_at: returns the tensor at a place of the model; None if there is none any more.
    """

    def __init__(
        self, keeper: OwnerKeeper, tensor_at: Callable[[Slot], torch.Tensor | None]
    ) -> None:
        self._keeper = keeper
        self._tensor_at = tensor_at
        self._origins: Mapping[Slot, Origin] = {}
        #: What is known of tensors that are awake, after what a script has written to them.
        self._woken: list[tuple[torch.Tensor, Owned]] = []

    def of(self, origins: Mapping[Slot, Origin]) -> None:
        """Takes the places of what this rank alone has."""
        self._origins = origins

    def rest(self) -> None:
        """Has them be owned, since all ranks run the same Python now."""
        for tensor, about in self._woken:
            own_up(tensor, about)
        self._woken.clear()
        for slot, origin in self._origins.items():
            held = self._tensor_at(slot)
            if held is not None:
                own_up(held, Owned(self._keeper, origin, is_own=True))

    def wake(self) -> bool:
        """Makes them tensors of torch, and their gradients; returns whether some were owned."""
        tensors = [each for each in map(self._tensor_at, self._origins) if each is not None]
        found = wake_all(tensors)
        gradients = [each.grad for each in tensors if each.requires_grad and each.is_leaf]
        found += wake_all(each for each in gradients if each is not None)
        self._woken += found
        return bool(found)

    def begin_step(self, model: nn.Module | None = None) -> None:
        """Makes them tensors of torch, which have other values after the step.

        Args:
            model: given where its structure has changed: all of it is looked at.
        """
        self.wake()
        if model is not None:
            wake_all([*model.parameters(), *model.buffers()])
        self._woken.clear()
