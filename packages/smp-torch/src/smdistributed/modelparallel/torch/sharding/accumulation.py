"""Over how many steps gradients are summed before they are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Accumulation:
    """Tells the parts of one model which step reduces what the steps before have added up.

    Args:
        steps: with a backward pass whose gradients are summed before a reduction.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._is_withheld = False

    @property
    def is_over_several(self) -> bool:
        """Whether the step in progress may not be the only one that is reduced."""
        return self._is_withheld or self._steps > 1

    def ends_after(self, done: int) -> bool:
        """Whether the step that follows ``done`` others reduces gradients."""
        return not self._is_withheld and done + 1 >= self._steps

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Inside, no step reduces gradients."""
        before, self._is_withheld = self._is_withheld, True
        try:
            yield
        finally:
            self._is_withheld = before
