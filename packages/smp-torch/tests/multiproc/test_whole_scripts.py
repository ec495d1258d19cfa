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
_IN_PIPELINES = frozenset(
    ("stylegan_r1_every_other_step_and_average", "moco_with_queue_and_key_encoder_between_steps")
)
_IN_SLICES = frozenset(
    (
        *("maml_with_functional_call", "balanced_losses_by_gradient_norms"),
        "weight_penalties_in_the_loss",
    )
)
REFUSED: dict[str, frozenset[str]] = {
    **dict.fromkeys(("pp2", "v"), _IN_PIPELINES),
    "pp2-tp2": _IN_PIPELINES | _IN_SLICES | {"lbfgs_with_closure"},
    "tp2": _IN_SLICES,
    "sdp2": frozenset(
        (
            "moco_in_one_module_written_in_the_step",
            "glow_actnorm_initialized_by_first_batch",
            "autoregressive_pixels_with_masked_convolutions",
        )
    ),
}
#: Chooses parameters by names that are others in slices, which a warning tells.
BY_NAMES = "bert_masked_words_with_resized_embeddings"
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
    known = {*refused, BY_NAMES} if "tp2" in world else refused
    others = {name: each for name, each in found.items() if name not in known}
    assert set(others.values()) <= {"exact", "whole"}, others
