"""One architecture of each kind gives the numbers of one process.

Each is tried in one way; the other ways are marked slow. ``nox -s long -- architectures`` runs
every architecture there is, not only those.
"""

from __future__ import annotations

import pytest
import registry
from job import attempt, start
from survey import ENVIRONMENT, config_of
from trial import Trial, Variant
from verdict import Kind, judge
from world import PRELOAD, without_fork

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]
ALONE, SPLIT = (
    World(number, start, (config_of(number),), without_fork(number, "fork"), ENVIRONMENT, PRELOAD)
    for number in (1, 2)
)
SECONDS = 100
#: One way an architecture, so that each way is among them. Of decoders and of encoders with
#: decoders there is one more representative each, which is slow.
QUICK = {
    "gpt2": Variant.CACHE,
    "mixtral": Variant.DROPOUT,
    "bert": Variant.UNEVEN_PADDING,
    "t5": Variant.CACHE,
    "vit": Variant.NO_DROPOUT,
    "wav2vec2": Variant.DROPOUT,
}
TRIALS = [
    pytest.param(
        trial,
        id=trial.stem,
        marks=() if QUICK.get(trial.name) is trial.variant else pytest.mark.slow,
    )
    for trial in (Trial(name, each) for name in registry.REPRESENTATIVE for each in Variant)
]


@pytest.mark.parametrize("trial", TRIALS)
def test_architecture_gives_the_numbers_of_one_process(worlds: Worlds, trial: Trial) -> None:
    pytest.importorskip("transformers")
    (reference,) = worlds.run(ALONE, attempt, trial, timeout=SECONDS)
    verdict = judge(reference, list(worlds.run(SPLIT, attempt, trial, timeout=SECONDS)))
    if verdict.kind in (Kind.ABSENT, Kind.INAPPLICABLE):
        pytest.skip(verdict.reason)
    assert verdict.kind is Kind.EXACT, f"{verdict.reason}\n{verdict.details}"
