"""One architecture of each kind gives the numbers of one process.

``nox -s architectures`` runs all of them.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import registry
from survey import survey
from trial import Trial, Variant
from verdict import Kind, Verdict

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]

TRIALS = [Trial(name, variant) for name in registry.REPRESENTATIVE for variant in Variant]


@functools.cache
def verdicts() -> Mapping[Trial, Verdict]:
    with tempfile.TemporaryDirectory() as directory:
        return survey(TRIALS, 2, Path(directory))


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.stem)
def test_architecture_gives_the_numbers_of_one_process(trial: Trial) -> None:
    pytest.importorskip("transformers")
    verdict = verdicts()[trial]
    if verdict.kind in (Kind.ABSENT, Kind.INAPPLICABLE):
        pytest.skip(verdict.reason)
    assert verdict.kind is Kind.EXACT, f"{verdict.reason}\n{verdict.details}"
