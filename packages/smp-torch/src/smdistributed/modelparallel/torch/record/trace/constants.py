"""Tensors that code reads besides its arguments: attributes, globals, numbers made into tensors.

Recorded calls do not keep them but read them anew in each microbatch. All microbatches run their
Python before anything is computed, so what is changed in place meanwhile has to be kept as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.notes import REMEDY
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor
from smdistributed.modelparallel.torch.compat.private.modes import past_recording
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.record.trace.tree import Constant

#: Up to this many elements a copy costs less than a refusal.
_SMALL = 1 << 14


class Constants:
    """What the tensors of one microbatch are."""

    def __init__(self) -> None:
        self._given: dict[Constant, torch.Tensor] = {}
        self._kept: dict[Constant, tuple[torch.Tensor, int]] = {}

    def __len__(self) -> int:
        return len(self._given)

    def forget_after(self, number: int) -> None:
        """Forgets what was taken since there were so many."""
        for constant in list(self._given)[number:]:
            del self._given[constant], self._kept[constant]

    def stands_for(self, constant: Constant, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what a constant stands for; takes it if that is new."""
        if constant in self._given:
            return self._given[constant] is tensor
        if not constant.is_like(tensor):
            return False
        self._take(constant, tensor)
        return True

    def of(self, tensor: torch.Tensor) -> Constant:
        """Returns what stands for a tensor in new entries."""
        for constant, given in self._given.items():
            if given is tensor:
                return constant
        constant = Constant(tensor)
        self._take(constant, tensor)
        return constant

    def _take(self, constant: Constant, tensor: torch.Tensor) -> None:
        if isinstance(tensor, AbsentTensor):
            raise UnsupportedError(
                f"a step reads {tensor!r}, whose values are not here. Make it a parameter or a "
                f"buffer of the model. {REMEDY}"
            )
        self._given[constant] = tensor
        with past_recording():
            # What shares memory with another library is changed without a trace.
            is_own = tensor.numel() > _SMALL and tensor.untyped_storage().resizable()
            kept = tensor if is_own else tensor.clone()
        self._kept[constant] = kept, version_of(kept)

    def again(self) -> Constants:
        """Returns the same, with what the tensors are now."""
        now = Constants()
        for constant, tensor in self._given.items():
            now._take(constant, tensor)
        return now

    def made_alike(
        self, mine: Sequence[Constant], other: Constants, theirs: Sequence[Constant]
    ) -> bool:
        """Whether tensors that were made anew for another microbatch are equal to these.

        Args:
            mine: the constants to compare.
            other: what the tensors of the other microbatch are.
            theirs: its constants, in the same order.
        """
        with past_recording():
            return all(
                self._given[one] is other._given[another]
                or torch.equal(self._kept[one][0], other._kept[another][0])
                for one, another in zip(mine, theirs, strict=True)
            )

    def given(self, constant: Constant) -> torch.Tensor:
        """Returns the tensor that a constant stands for in this microbatch."""
        return self._given[constant]

    def known(self, constant: Constant, where: str) -> torch.Tensor:
        """Returns the tensor for a constant that a question depends on.

        Args:
            constant: the constant.
            where: who asks, for messages.

        Raises:
            UnsupportedError: a module that stays whole reads it.
        """
        if constant not in self._kept:
            raise UnsupportedError(
                f"{where} makes Python depend on what a module that stays whole computes of a "
                f"tensor of its own, {constant}. Keep the decision inside that module."
            )
        return self._kept[constant][0]

    def tensors(self, constants: Sequence[Constant]) -> list[torch.Tensor]:
        """Returns the tensors for some constants, as they were when they were read.

        Raises:
            UnsupportedError: a large one was changed in place since.
        """
        found = []
        for constant in constants:
            tensor, version = self._kept[constant]
            if version_of(tensor) != version:
                raise UnsupportedError(
                    f"a tensor of shape {tuple(tensor.shape)} that belongs to no DistributedModel "
                    "was read and then changed in place in one call of a step function. Make a new "
                    "tensor instead of changing it, or change it between the calls."
                )
            found.append(tensor)
        return found
