"""What the tensors of a pass are made from, where that tells of their numbers.

Some are made from constants alone, and have the same numbers in every pass. Others are made from
what the pass is given besides, and are known before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of, version_of
from smdistributed.modelparallel.torch.tensors.memory import MemoryNotes


class Origin(NamedTuple):
    """What the arguments of a call are made from.

    Attributes:
        is_constant: they have the same numbers in every pass.
        calls: the positions of the calls that make them from what the pass is given alone; None if
            they are made from something else.
    """

    is_constant: bool
    calls: frozenset[int] | None


#: Anything.
OTHERS = Origin(is_constant=False, calls=None)
#: Tensors of a pass with their numbers; None for those from outside.
_Numbered = Sequence[tuple[int | None, torch.Tensor]]


class Origins:
    """Of each tensor of a pass, what it is made from.

    Args:
        device_type: where the pass is computed; a tensor from outside that is elsewhere is compared
            in every pass.

    Attributes:
        is_given_written: memory was written to that is given to the pass.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        #: By number: the version that is a constant.
        self._constant: dict[int, int] = {}
        #: By number: the version that is made from what is given, and the calls that make it.
        self._ahead: dict[int, tuple[int, frozenset[int]]] = {}
        #: Memory that was written to, and whether by constant calls alone: of what sees it by
        #: ``x.data`` and such, the others have no new version.
        self._written = MemoryNotes[bool]()
        #: Where what is given is: other libraries see its memory by tensors of their own.
        self._given: list[range] = []
        self.is_given_written = False

    def note_given(self, tensors: _Numbered) -> None:
        """Takes note of tensors that are there before the pass begins."""
        for number, each in tensors:
            if number is not None and _is_strided(each):
                self._ahead[number] = version_of(each), frozenset()
                self._given.append(_addresses(each))

    def of(self, tensors: _Numbered) -> Origin:
        """Returns what tensors are made from, together."""
        calls: frozenset[int] | None = frozenset()
        for number, each in tensors:
            own = self._calls(number, each)
            calls = None if own is None or calls is None else calls | own
        return Origin(all(self._is_constant(*each) for each in tensors), calls)

    def note_call(
        self,
        position: int,
        origin: Origin,
        given: _Numbered,
        made: _Numbered,
        written: Sequence[torch.Tensor],
    ) -> None:
        """Takes note of a call.

        Args:
            position: on the tape.
            origin: of its arguments.
            given: tensors that it was given.
            made: that it has returned.
            written: of those that it was given, those that it has written to.
        """
        with past_subclass_functions():
            for each in filter(_is_strided, written):
                before = self._written.get(storage_of(each))
                self._written[each] = origin.is_constant and before is not False
                self.is_given_written |= self._lies_in_given(each)
            if origin.is_constant:
                for number, each in (*given, *made):
                    if number is not None:
                        self._constant[number] = version_of(each)
            if origin.calls is not None and not written:
                for number, each in made:
                    if number is not None:
                        calls = origin.calls | {position}
                        self._ahead.setdefault(number, (version_of(each), calls))

    def _lies_in_given(self, tensor: torch.Tensor) -> bool:
        own = _addresses(tensor) if self._given else range(0)
        return any(own.start < each.stop and each.start < own.stop for each in self._given)

    def _is_constant(self, number: int | None, tensor: torch.Tensor) -> bool:
        if number is None:
            return tensor.device.type != self._device_type
        is_same = self._constant.get(number) == version_of(tensor)
        return is_same and self._writing_to(tensor) is not False

    def _calls(self, number: int | None, tensor: torch.Tensor) -> frozenset[int] | None:
        if number is None:
            return None if tensor.device.type == self._device_type else frozenset()
        version, calls = self._ahead.get(number, (None, None))
        is_same = version == version_of(tensor) and self._writing_to(tensor) is None
        return calls if is_same else None

    def _writing_to(self, tensor: torch.Tensor) -> bool | None:
        """Returns how the memory of a tensor was written to; None if it was not."""
        with past_subclass_functions():
            return self._written.get(storage_of(tensor)) if _is_strided(tensor) else False


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _addresses(tensor: torch.Tensor) -> range:
    """Returns where the memory of a tensor is, all of it."""
    memory = tensor.untyped_storage()
    return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
