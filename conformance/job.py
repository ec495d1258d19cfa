"""What the processes of a world do: start the library, then one case after another."""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable

from conformance import lines, registry
from conformance.adapters import adapter_of
from conformance.adapters.base import Adapter
from conformance.outcome import Outcome, Status
from conformance.worlds import WORLDS, can_fork, preloaded
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.testing import fork_client


def start(framework: str, world_name: str) -> Callable[[], None]:
    """Makes this process one of a world; returns what is done before each case."""
    world = WORLDS[world_name]
    registry.load(framework)
    adapter = adapter_of(framework)
    if world.is_started:
        with lines.noted(world_name, lines.START):
            adapter.smp.init(world.config_of(framework))
    return adapter.reset


def attempt(framework: str, world_name: str, name: str) -> Outcome:
    """Runs a case on this rank.

    Raises:
        Exception: the case failed; the world is of no use any more.
    """
    case = registry.load(framework)[name]
    adapter = adapter_of(framework)
    if WORLDS[world_name].is_started:
        return _attempt(case, adapter, world_name)
    return _attempt_in_a_fork(case, adapter, world_name)


def _attempt(case: registry.Case, adapter: Adapter, world_name: str) -> Outcome:
    try:
        with warnings.catch_warnings(), lines.noted(world_name, case.name):
            case.body(adapter)
    except UnsupportedError as error:
        if case.is_built:
            raise
        return Outcome(Status.NOT_BUILT, str(error))
    if not case.is_built:
        return Outcome(Status.FAILED, "this is built now: give it a case that tries it.")
    return Outcome(Status.PASSED)


def _attempt_in_a_fork(case: registry.Case, adapter: Adapter, world_name: str) -> Outcome:
    """Runs a case in a copy of this process, which may start and end the library."""
    if case.starts_jobs and can_fork(adapter.name):
        # Here, so that one server imports the framework for all such cases.
        fork_client.server_with(preloaded(adapter.name))
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        try:
            outcome = _attempt(case, adapter, world_name)
        except BaseException:  # also what pytest raises; nothing else may run in this copy
            outcome = Outcome(Status.FAILED, traceback.format_exc())
        with os.fdopen(target, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as pipe:
        data = pipe.read()
    _, code = os.waitpid(child, 0)
    if not data:
        return Outcome(Status.FAILED, f"the process of the case ended with wait status {code}.")
    found: Outcome = pickle.loads(data)
    return found
