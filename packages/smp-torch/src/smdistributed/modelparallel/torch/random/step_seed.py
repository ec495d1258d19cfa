"""The number that a step takes from the user's generator, and gives back if it draws nothing.

What a script draws between steps, its batches say, are then the numbers of plain PyTorch. Whether a
step has drawn goes by that step alone, never by those before it: a job that is resumed in the
middle goes on with the same numbers.
"""

from __future__ import annotations

import ctypes

import torch

from smdistributed.modelparallel.torch.compat.private.modes import (
    past_all_modes,
    past_function_modes,
)


class StepSeed:
    """The seed of one step, drawn when this is made.

    Attributes:
        number: the seed.
    """

    def __init__(self) -> None:
        self._before = _state()
        self.number = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        self._after = _state()

    def give_back(self) -> None:
        """Puts the generator back to where it was, unless something else has moved it since."""
        if _state() == self._after:
            with past_all_modes():
                state = torch.frombuffer(bytearray(self._before), dtype=torch.uint8)
                torch.default_generator.set_state(state)


def _state() -> bytes:
    with past_function_modes():
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)
