"""Tensor parallelism of models that nobody wrote a map for, in real processes."""

from __future__ import annotations

from pathlib import Path

import auto_cases
import auto_transformers
import pytest
import tensor_cases
from test_tensor_parallel import LAYOUTS, SHARDS, WORLDS, split
from world import quick, run, world_of

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def run_trained() -> None:
    auto_cases.trained()


def run_behaviour(name: str) -> None:
    auto_cases.BEHAVIOUR[name]()


def run_transformers(name: str) -> None:
    auto_transformers.case(name)


# In a pipeline every run tries it with passes that differ, see test_tensor_parallel.
@pytest.mark.parametrize("world", quick(tuple(WORLDS), ("tp2", "tp2-prescaled")))
def test_training_is_that_of_one_process(worlds: Worlds, world: str) -> None:
    run(worlds, WORLDS[world], run_trained)


@pytest.mark.parametrize("case", auto_cases.BEHAVIOUR)
def test_behaviour(worlds: Worlds, case: str) -> None:
    run(worlds, WORLDS["tp2"], run_behaviour, case)


@pytest.mark.parametrize("case", quick(tuple(auto_cases.PIPELINED), ()))
def test_behaviour_in_a_pipeline(worlds: Worlds, case: str) -> None:
    run(worlds, WORLDS["pp2-tp2"], run_behaviour, case)


def losses_with_dropout() -> list[float]:
    return auto_cases.dropout_losses()


@pytest.mark.parametrize(
    ("world", "size"),
    [
        ("tp2", 2),
        pytest.param("pp2-tp2", 2, marks=pytest.mark.slow),
        pytest.param("tp4", 4, marks=pytest.mark.slow),
    ],
)
def test_dropout_is_that_of_one_process(worlds: Worlds, world: str, size: int) -> None:
    one = world_of(1, {"microbatches": tensor_cases.MICROBATCHES * size, "ddp": True})
    (want,) = run(worlds, one, losses_with_dropout)
    for got in run(worlds, WORLDS[world], losses_with_dropout):
        assert got == pytest.approx(want, rel=2e-6)
    assert len(set(want)) == len(want)


#: Where checkpoints are saved and resumed: also in shards of slices, of which some are fused.
PLACES = {**LAYOUTS, "tp2-shards": split(2, 4, **SHARDS)}


def losses_around_a_checkpoint(path: str, resume: bool) -> list[float]:
    return auto_cases.saved_losses(path, resume=resume)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("tp2", "pp2"),
        *(
            pytest.param(one, other, marks=pytest.mark.slow)
            for one, other in (
                *(("pp2-tp2", "tp2"), ("tp2", "tp4"), ("dp4", "tp2")),
                *(("tp2-shards", "pp2"), ("tp2-shards", "tp2")),
            )
        ),
    ],
)
def test_checkpoints_fit_any_degree(
    worlds: Worlds, tmp_path: Path, saved: str, resumed: str
) -> None:
    path = str(tmp_path)
    want = run(worlds, PLACES[saved], losses_around_a_checkpoint, path, False)[0]
    for got in run(worlds, PLACES[resumed], losses_around_a_checkpoint, path, True):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    quick(
        tuple(each.__name__ for each in auto_transformers.TRANSFORMERS),
        ("qwen3", "openai", "phi3"),
    ),
)
def test_transformers_give_their_own_numbers(worlds: Worlds, name: str) -> None:
    pytest.importorskip("transformers")
    run(worlds, WORLDS["tp2"], run_transformers, name)
