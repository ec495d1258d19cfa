"""One architecture of each kind gives the numbers of one process.

``nox -s architectures`` runs all of them.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import registry
from survey import survey
from trial import Trial, Variant
from verdict import Kind, Verdict

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]

_CONNECTIONIST_LABELS = "the labels of the loss have a shape that depends on data"
KNOWN = {
    Trial("gemma2", Variant.CACHE): "a cache of sliding windows cannot pass between partitions",
    Trial("wav2vec2", Variant.NO_DROPOUT): _CONNECTIONIST_LABELS,
    Trial("wav2vec2", Variant.DROPOUT): _CONNECTIONIST_LABELS,
    Trial("wav2vec2", Variant.UNEVEN_PADDING): _CONNECTIONIST_LABELS,
}
TRIALS = [Trial(name, variant) for name in registry.REPRESENTATIVE for variant in Variant]


def _parameter(trial: Trial) -> Any:
    known = KNOWN.get(trial)
    marks = [pytest.mark.xfail(reason=known)] if known else []
    return pytest.param(trial, id=trial.stem, marks=marks)


@functools.cache
def verdicts() -> Mapping[Trial, Verdict]:
    with tempfile.TemporaryDirectory() as directory:
        return survey(TRIALS, 2, Path(directory))


@pytest.mark.parametrize("trial", [_parameter(trial) for trial in TRIALS])
def test_architecture_gives_the_numbers_of_one_process(trial: Trial) -> None:
    pytest.importorskip("transformers")
    verdict = verdicts()[trial]
    if verdict.kind in (Kind.ABSENT, Kind.INAPPLICABLE):
        pytest.skip(verdict.reason)
    assert verdict.kind is Kind.EXACT, f"{verdict.reason}\n{verdict.details}"
