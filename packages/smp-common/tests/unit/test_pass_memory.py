"""What passes hold at their fullest, given their order."""

from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.planning.pass_memory import PassMemory, most_held
from smdistributed.modelparallel.common.planning.schedule import parse_actions

MEMORY = PassMemory(kept=10, forward=13, backward=17, first_half=19, waiting=8, weights=2)


@pytest.mark.parametrize(
    ("order", "most"),
    [
        ("F0", 13),  # of a step without gradients nothing is kept
        ("F0 F1", 13),
        ("F0 B0 F1 B1", 17),
        ("F0 F1 B0 B1", 27),
        ("F0 F1 F2 B0 B1 B2", 37),
        ("F0 I0 W0", 19),
        ("F0 I0 F1 W0 I1 W1", 21),  # what waits, and a forward pass
        ("F0 F1 I0 I1 W0 W1", 29),
    ],
)
def test_the_most_that_is_held_follows_from_the_order(order: str, most: float) -> None:
    assert most_held(parse_actions(order), lambda action: MEMORY) == most


def test_parts_in_turn_hold_what_those_before_have_kept() -> None:
    loss = PassMemory(kept=4, forward=20, backward=30, first_half=30, weights=5)
    both = MEMORY.then(loss)
    assert both == PassMemory(14, 30, 40, 40, 8, 5)
    # The first half of the first part comes last, beside what waits of the second.
    assert loss.then(MEMORY).first_half == 38
    assert MEMORY.times(2) == PassMemory(20, 26, 34, 38, 16, 2)
