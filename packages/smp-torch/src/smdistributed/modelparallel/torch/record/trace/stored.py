"""Activations that code between modules stores where they outlive the microbatch: ``self.kl = kl``.

While Python runs, a fake stands there, and code of the same microbatch computes with it. Then the
place is closed: what the next microbatch would read is of another one. When the step has run, the
tensor of the last microbatch that stored one there is put into the place, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.ir import Value
from smdistributed.modelparallel.torch.record.trace.unknown import Unknown


@dataclass(eq=False)
class Stored:
    """A place with a fake in it.

    Attributes:
        name: of the place, for messages.
        identity: of the fake, which lives as long as its trace: who holds it is counted.
        value: what it stands for.
        get: returns what is in the place.
        put: puts something there.
    """

    name: str
    identity: int
    value: Value
    get: Callable[[], Any]
    put: Callable[[Any], None]

    def __post_init__(self) -> None:
        self._closed = Unknown(self._refusal)

    def close(self) -> bool:
        """Has nobody take the fake for the tensor of another microbatch; returns if it is there."""
        is_there = id(self.get()) == self.identity
        if is_there:
            self.put(self._closed)
        return is_there

    def fill(self, tensor: torch.Tensor) -> None:
        """Puts the tensor there, if nothing else was put there since.

        Shape: that of the fake.
        """
        if self.get() is self._closed:
            self.put(tensor)

    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} has a tensor that an earlier microbatch of a pipelined step stored, or "
            "one of a step that has failed: all microbatches run their Python before anything is "
            "computed. Store it before it is read, or read it after the call of the step function."
        )
