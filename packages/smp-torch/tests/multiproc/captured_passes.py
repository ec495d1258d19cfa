"""Ranks that differ, see ``other_passes``, once their microbatches were captured.

All do the same until what they do is launched; then one of them goes another way, or has no
gradient where others have one.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

from graph_cases import captured
from other_passes import ALIKE, Case, Training, cases, population_of

#: Two steps run as they are, the third one launches what was captured.
_STEPS_ALIKE = 3


class Captured(Training):
    """A split model whose microbatches are launched, and plain PyTorch beside it.

    Args:
        case: how ranks differ from then on.
        launched: gets something for each step that is.
    """

    def __init__(self, case: Case, launched: list[Any]) -> None:
        launched.clear()
        gc.collect()  # also the models of other cases, which have gradients
        super().__init__(dataclasses.replace(case, **ALIKE))
        for step in range(_STEPS_ALIKE):
            self.step(100 + step)
        assert launched, "it was not captured"
        self.case = case


class Differing(Training):
    """A split model whose ranks differ in the steps, too, that would be captured.

    Args:
        case: how they do.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        for step in range(_STEPS_ALIKE):
            self.step(100 + step)


def from_the_start() -> dict[str, int]:
    """Tries cases of whose passes no graph makes up for what a rank lacks."""
    passes = ("other head", "head left out", "none")
    found = [Case("registered", "alike", each, "always", False) for each in passes]
    with captured():
        return population_of(Differing, found, 0, 1)


def population(model: str, first: int, stride: int) -> dict[str, int]:
    """Tries cases; returns how often all ranks came to which end."""
    with captured() as (launched, _):
        return population_of(lambda case: Captured(case, launched), cases(model), first, stride)
