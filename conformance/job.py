"""What the processes of a world do: run cases one after another."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from _pytest.outcomes import Failed

from smdistributed.modelparallel.common.errors import UnsupportedError

# The package need not be installed: it is found beside itself, also by jobs that cases start.
_ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, _ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))

from conformance import registry
from conformance.adapters import adapter_of
from conformance.adapters.base import Adapter
from conformance.outcome import Outcome, Status
from conformance.worlds import WORLDS


def run(framework: str, world_name: str, names: Sequence[str]) -> dict[str, Outcome]:
    """Runs cases in this process; to be called on every rank of a world.

    Returns:
        what became of each case here.
    """
    world = WORLDS[world_name]
    cases = registry.load(framework)
    adapter = adapter_of(framework)
    if world.is_started:
        adapter.smp.init(world.config_of(framework))
    outcomes = {}
    for name in names:
        adapter.reset()
        attempt = _attempt if world.is_started else _attempt_in_a_fork
        outcomes[name] = attempt(cases[name], adapter)
        gc.collect()  # every rank forgets the case's models at the same time
    return outcomes


def _attempt(case: registry.Case, adapter: Adapter) -> Outcome:
    try:
        with warnings.catch_warnings():
            case.body(adapter)
    except UnsupportedError as error:
        if not case.is_built:
            return Outcome(Status.NOT_BUILT, str(error))
        return Outcome(Status.FAILED, traceback.format_exc())
    except (Exception, Failed):
        return Outcome(Status.FAILED, traceback.format_exc())
    if not case.is_built:
        return Outcome(Status.FAILED, "this is built now: give it a case that tries it.")
    return Outcome(Status.PASSED)


def _attempt_in_a_fork(case: registry.Case, adapter: Adapter) -> Outcome:
    """Runs a case in a copy of this process, which may start and end the library."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        with os.fdopen(target, "wb") as pipe:
            pickle.dump(_attempt(case, adapter), pipe)
        os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as pipe:
        data = pipe.read()
    _, code = os.waitpid(child, 0)
    if not data:
        return Outcome(Status.FAILED, f"the process of the case ended with wait status {code}.")
    outcome: Outcome = pickle.loads(data)
    return outcome
