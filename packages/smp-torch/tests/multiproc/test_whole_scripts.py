"""Scripts as users write them, beside plain PyTorch: never silently wrong, and rarely refused."""

from __future__ import annotations

import importlib.util

import pytest
import scripts.all
from scripts.kit import SCRIPTS
from scripts.worlds import WORLDS, outcomes_in

from smdistributed.modelparallel.common.testing import Worlds

assert scripts.all
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

#: World -> what every run tries: scripts that go ways which no other test goes.
SAMPLES = {
    "pp2": (
        "byol_with_target_in_the_module",
        "hinge_gan_with_class_projection",
        "real_nvp_with_logdet_and_masks",
    ),
    "tp2": ("ema_by_averaged_model_evaluated_by_swap", "stochastic_depth_by_python_random"),
}
#: World -> what is refused there; see ``docs/decisions/open.md``.
REFUSED: dict[str, frozenset[str]] = {}
PARTS = 8


def has_what_it_needs(name: str) -> bool:
    """Whether what a script imports is there."""
    needs = SCRIPTS[name].needs
    return not needs or importlib.util.find_spec(needs) is not None


def test_there_are_enough_scripts() -> None:
    assert len(SCRIPTS) >= 120
    assert all(map(SCRIPTS.__contains__, (*SAMPLES["pp2"], *SAMPLES["tp2"])))


@pytest.mark.parametrize("world", SAMPLES)
def test_some_scripts(worlds: Worlds, world: str) -> None:
    assert dict(outcomes_in(worlds, world, SAMPLES[world])) == (
        dict.fromkeys(SAMPLES[world], "exact")
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world", [each for each in WORLDS if each != "one"])
def test_scripts(worlds: Worlds, world: str, part: int) -> None:
    names = [name for name in SCRIPTS if has_what_it_needs(name)][part::PARTS]
    found = dict(outcomes_in(worlds, world, names))
    refused = {name for name, each in found.items() if each.startswith("refused")}
    assert refused <= REFUSED.get(world, frozenset())
    others = {name: each for name, each in found.items() if name not in refused}
    assert set(others.values()) <= {"exact", "whole"}, others
