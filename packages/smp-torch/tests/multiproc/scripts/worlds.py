"""The jobs that scripts run in, and runs of one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from world import world_of

from scripts import outcomes
from scripts.kit import MICROBATCHES, SCRIPTS
from smdistributed.modelparallel.common.testing import World, Worlds
from smdistributed.modelparallel.common.testing.run_ranks import RanksFailedError

SECONDS = 240.0
_TWO = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
_WHOLE = {"pipeline_parallel_degree": 1, "microbatches": MICROBATCHES, "ddp": True}
_SHARDS = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 1,
    # As plain PyTorch, which clips nothing by itself.
    "sdp_gradient_clipping": float("inf"),
}
WORLDS: dict[str, World] = {
    "one": world_of(1, {**_TWO, "pipeline_parallel_degree": 1}),
    "pp2": world_of(2, _TWO),
    "v": world_of(2, {**_TWO, "pipeline": "zero_bubble_v"}),
    "pp2-tp2": world_of(4, {**_TWO, "tensor_parallel_degree": 2, "ddp": True}),
    "sdp2": world_of(2, {**_WHOLE, **_SHARDS}),
    "tp2": world_of(2, {**_WHOLE, "tensor_parallel_degree": 2}),
}
#: Where scripts that draw are held against another world than one process: the ranks of a
#: tensor-parallel group draw for examples of their own.
DRAWN_IN = {"tp2": "tp2", "pp2-tp2": "tp2"}


def outcome(name: str, folder: str, expected: Any) -> str:
    return outcomes.outcome_of(name, folder, expected)


def numbers(name: str, folder: str) -> Any:
    return outcomes.numbers_of(name, folder)


def outcomes_in(worlds: Worlds, world: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the name of each script and what became of it."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            expected = None
            try:
                if SCRIPTS[name].draws:
                    with tempfile.TemporaryDirectory() as own:
                        drawn_in = WORLDS[DRAWN_IN.get(world, "one")]
                        expected = worlds.run(drawn_in, numbers, name, own, timeout=SECONDS)
                ranks = worlds.run(WORLDS[world], outcome, name, folder, expected, timeout=SECONDS)
                found = outcomes.in_all(ranks)
            except RanksFailedError as error:
                found = f"{'hung' if 'no end within' in str(error) else 'unclear'}: {error}"
        if found not in ("exact", "whole"):
            # Its ranks may not be at one.
            worlds.drop(WORLDS[world])
        yield name, found
