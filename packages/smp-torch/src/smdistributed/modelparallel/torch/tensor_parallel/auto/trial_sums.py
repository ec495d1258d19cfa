"""The sums that slices make in the middle of a call, where all ranks are tried in one process.

The slices of each rank run up to a sum whose shares are not there yet. When each rank has given its
own, all run again, and are given the sum, until they come to their ends. As a sum is connected with
the shares that it was made of, gradients go the way that they go between ranks.
"""

from __future__ import annotations

import torch


class PausedError(BaseException):
    """Leaves a call at a sum; nothing that code catches."""


class TrialSums:
    """The sums of one call, in their order."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._shares: list[torch.Tensor] = []
        self._place = 0

    def begin(self) -> None:
        """Takes note that the slices of another rank begin."""
        self._place = 0

    def add_up(self, share: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the shares of all ranks; see ``Gate``.

        Raises:
            PausedError: it is not known yet.
        """
        if self._place == len(self._sums):
            self._shares.append(share)
            raise PausedError
        self._place += 1
        return self._sums[self._place - 1].clone()  # code may change it in place

    def go_on(self, size: int) -> bool:
        """Returns whether the slices are to run again, as there is one more sum.

        Args:
            size: how many ranks there are.

        Raises:
            ValueError: some ranks alone have come to it, or with other shapes.
        """
        if not self._shares:
            return False
        shapes = {each.shape for each in self._shares}
        if len(self._shares) != size or len(shapes) > 1:
            raise ValueError("its slices sum at other places")
        self._sums.append(sum(self._shares[1:], self._shares[0]))
        self._shares = []
        return True
