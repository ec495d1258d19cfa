"""Activations that code between modules stores where they outlive the microbatch: ``self.kl = kl``.

While Python runs, a fake stands there, and code of the same microbatch computes with it. Then the
place is closed: what the next microbatch would read is of another one. When the step has run, the
tensor of the last microbatch that stored one there is put into the place, on every rank.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.containers import take_apart
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.record.ir import Value
from smdistributed.modelparallel.torch.record.trace.places import Place
from smdistributed.modelparallel.torch.record.trace.unknown import Unknown


class Stored:
    """A place with a fake in it, or with a tuple around some.

    Args:
        place: where.
        tensors: by the identity of a fake, what it stands for, or the tensor that it is in this
            microbatch as in all others. The fakes live as long as their trace: who holds them is
            counted.

    Attributes:
        values: what the fakes in it stand for.
    """

    def __init__(self, place: Place, tensors: Mapping[int, Value | torch.Tensor]) -> None:
        self._place = place
        self._identities = list(map(id, fakes_in(place.get())))
        self._tensors = tensors
        self.values = [each for each in tensors.values() if isinstance(each, Value)]
        self._closed = Unknown(self._refusal)
        #: What the last microbatch has stored, with values in the places of fakes.
        self._content: Any = None

    @property
    def row(self) -> list[Any] | collections.deque[Any] | None:
        """The list that it is in: others may be behind it in another microbatch."""
        owner = self._place.owner
        return owner if isinstance(owner, list | collections.deque) else None

    def close(self) -> bool:
        """Has nobody take a fake for the tensor of another microbatch; returns if it is there."""
        content = self._place.get()
        is_there = list(map(id, fakes_in(content))) == self._identities
        if is_there:
            self._content = replaced(content, lambda each: self._tensors.get(id(each), each))
            self._put(self._closed)
        return is_there

    def fill(self, computed: Mapping[int, torch.Tensor]) -> None:
        """Puts the tensors there, if nothing else was put there since.

        Args:
            computed: the tensors of values, by their index.
        """
        if self._place.get() is self._closed:

            def tensor(part: Any) -> Any:
                return computed[part.index].detach() if isinstance(part, Value) else part

            self._put(replaced(self._content, tensor))

    def _put(self, content: Any) -> None:
        assert self._place.put is not None
        self._place.put(content)

    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._place.name} has a tensor that an earlier microbatch of a pipelined step "
            "stored, or one of a step that has failed: all microbatches run their Python before "
            "anything is computed. Store it before it is read, or read it after the call of the "
            "step function."
        )


def fakes_in(content: Any) -> Iterator[FakeTensor]:
    """Yields what is in a place: the fakes in a tuple, a list or a dict, or itself."""
    if isinstance(content, tuple | list | dict):
        for each in content.values() if isinstance(content, dict) else content:
            yield from fakes_in(each)
    elif isinstance(content, FakeTensor):
        yield content


def replaced(content: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a content with something else in the places of its parts."""
    if not isinstance(content, tuple | list | dict):
        return function(content)
    parts = take_apart(content)
    assert parts is not None
    return parts.build({key: replaced(item, function) for key, item in parts.items.items()})
