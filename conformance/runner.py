"""Runs cases, one job a world, and gathers what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from conformance import job
from conformance.adapters import missing
from conformance.outcome import Outcome, Status, worst
from conformance.registry import Case
from conformance.worlds import WORLDS, World
from smdistributed.modelparallel.common.testing import RanksFailedError, run_ranks

#: A start on a busy machine, and time for each case: those of TensorFlow trace a model.
_START_SECONDS = 120
_CASE_SECONDS = {"torch": 1, "tensorflow": 8}


def run(
    framework: str, cases: Mapping[str, Case], note: Callable[[str], None] = lambda _: None
) -> dict[str, Outcome]:
    """Runs cases.

    Args:
        framework: whose package is tried.
        cases: by name.
        note: is told of each world that has ended.

    Returns:
        what became of each case, over all its worlds and ranks.
    """
    if reason := missing(framework):
        return dict.fromkeys(cases, Outcome(Status.NOT_BUILT, reason))
    found: dict[str, list[Outcome]] = {name: [] for name in cases}

    def run_cases_of(world: World) -> None:
        names = [name for name, case in cases.items() if world.name in case.worlds]
        if not names:
            return
        started = time.monotonic()
        for name, outcome in _run_world(framework, world.name, names).items():
            found[name].append(outcome)
        seconds = time.monotonic() - started
        note(f"{world.name}: {len(names)} cases on {world.num_ranks} ranks, {seconds:.0f} s")

    alone = [world for world in WORLDS.values() if world.num_ranks == 1]
    several = [world for world in WORLDS.values() if world.num_ranks > 1]
    # Single processes leave a core to the others.
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda group: [run_cases_of(each) for each in group], (alone, several)):
            pass
    return {name: worst(outcomes) for name, outcomes in found.items()}


def _run_world(framework: str, world_name: str, names: list[str]) -> dict[str, Outcome]:
    """Returns the outcomes of one world; a case that ends its job leaves the others to another."""
    world = WORLDS[world_name]
    try:
        ranks = run_ranks(
            world.num_ranks,
            job.run,
            launcher="python" if world.num_ranks == 1 else "smprun",
            timeout=_START_SECONDS + _CASE_SECONDS[framework] * len(names),
            env={"OMP_NUM_THREADS": "1"},
            args=[framework, world_name, names],
        ).results
    except RanksFailedError as error:
        if len(names) == 1:
            return {names[0]: Outcome(Status.FAILED, str(error))}
        half = len(names) // 2
        return {
            **_run_world(framework, world_name, names[:half]),
            **_run_world(framework, world_name, names[half:]),
        }
    return {name: worst([rank[name] for rank in ranks]) for name in names}
