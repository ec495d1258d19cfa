"""Runs cases, one world after another, and gathers what became of them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from conformance import job, registry
from conformance.adapters import missing
from conformance.outcome import Outcome, Status, worst
from conformance.registry import Case
from conformance.worlds import WORLDS, World, preloaded
from smdistributed.modelparallel.common import testing

#: For one case on a busy machine: those of TensorFlow trace a model, some start a job.
_CASE_SECONDS = 300
#: How many cases of each world are shown as the ones that took longest.
_NUM_SHOWN = 5


def run(
    framework: str,
    cases: Mapping[str, Case],
    note: Callable[[str], None] = lambda _: None,
    *,
    is_quick: bool = False,
) -> dict[str, Outcome]:
    """Runs cases.

    Args:
        framework: whose package is tried.
        cases: by name.
        note: is told of each world that has ended.
        is_quick: leaves worlds out, see ``Case.some_worlds``.

    Returns:
        what became of each case, over all its worlds and ranks.
    """
    if reason := missing(framework):
        return dict.fromkeys(cases, Outcome(Status.NOT_BUILT, reason))
    found: dict[str, list[Outcome]] = {name: [] for name in cases}
    for name, case in cases.items():
        if lacks := case.lacks():
            reason = f"needs {', '.join(lacks)}, which this environment does not have"
            found[name].append(Outcome(Status.NOT_INSTALLED, reason))
    possible = {name: case for name, case in cases.items() if not found[name]}

    def run_cases_of(world: World) -> None:
        names = [
            name
            for name, case in possible.items()
            if world.name in (case.some_worlds(framework) if is_quick else case.worlds)
        ]
        if not names:
            return
        started = time.monotonic()
        ends = [started]
        for name, outcome in outcomes_in(framework, world, names):
            found[name].append(outcome)
            ends.append(time.monotonic())
        seconds = time.monotonic() - started
        note(f"{world.name}: {len(names)} cases on {world.num_ranks} ranks, {seconds:.0f} s")
        durations = [later - earlier for earlier, later in itertools.pairwise(ends)]
        for took, name in sorted(zip(durations, names, strict=True), reverse=True)[:_NUM_SHOWN]:
            note(f"  {took:5.1f} s {name}")

    alone = [world for world in WORLDS.values() if world.num_ranks == 1]
    several = [world for world in WORLDS.values() if world.num_ranks > 1]
    # Single processes leave a core to the others.
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda group: [run_cases_of(each) for each in group], (alone, several)):
            pass
    return {name: worst(outcomes) for name, outcomes in found.items()}


def outcomes_in(
    framework: str,
    world: World,
    names: Sequence[str],
    sources: str = "",
    *,
    is_hasty: bool = False,
) -> Iterator[tuple[str, Outcome]]:
    """Yields cases and what became of them in a world, which a case that fails may end.

    Args:
        framework: whose package is tried.
        world: where.
        names: of the cases.
        sources: a search path of packages to try in the place of those that this process has.
        is_hasty: no world needs to be started as users do it.
    """
    # What copies of one process have imported before: all, or all that is not tried.
    known = preloaded(framework)
    if not sources:
        known += (f"conformance.adapters.{framework}", *registry.modules())
        # Each case of a job runs in a copy, and would import these anew.
        known += tuple(
            f"{name}.{each}"
            for name in registry.JOBS
            if find_spec(name)
            for each in ("pytorch", "tensorflow")
        )
    started = testing.World(
        world.num_ranks,
        job.start,
        (framework, world.name),
        world.launcher_of(framework, is_hasty=is_hasty),
        {"OMP_NUM_THREADS": "1", **({"PYTHONPATH": sources} if sources else {})},
        known,
    )
    with contextlib.closing(testing.Worlds()) as pool:
        for name in names:
            task = (framework, world.name, name)
            try:
                yield name, worst([*pool.run(started, job.attempt, *task, timeout=_CASE_SECONDS)])
            except testing.RanksFailedError as error:
                yield name, Outcome(Status.FAILED, str(error))
