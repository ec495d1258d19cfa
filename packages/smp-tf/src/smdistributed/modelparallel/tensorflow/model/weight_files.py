"""A whole model in files of Keras: ``save``, ``save_weights`` and ``load_weights``.

They are those of the model without the library. Keras writes and reads them as it does for one
process, while variables of other processes have values here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from smdistributed.modelparallel.common.errors import CheckpointError, NotPartitionedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.variables import free
from smdistributed.modelparallel.tensorflow.model.whole_optimizer import (
    collected_state,
    with_state,
)
from smdistributed.modelparallel.tensorflow.model.whole_weights import collected
from smdistributed.modelparallel.tensorflow.parameters.variables import is_here


def write_weights(engine: Any, write: Callable[[], Any]) -> None:
    """Writes the weights, in the first process of the first replica. Collective: its pipeline.

    Args:
        engine: of the model.
        write: lets Keras write them.

    Raises:
        CheckpointError: it failed; on all processes of the pipeline.
        NotPartitionedError: there are no weights yet.
    """

    def write_alone() -> None:
        with _without_optimizer(engine.model):
            write()

    _write(engine, write_alone)


def write_model(engine: Any, wrapped: Any, write: Callable[[], Any]) -> None:
    """Writes a model of Keras as it is compiled, with the state of its optimizer.

    Collective: its pipeline; the first process of the first replica writes.

    Args:
        engine: of the model.
        wrapped: the model of Keras in it.
        write: lets Keras write it.

    Raises:
        CheckpointError: it failed; on all processes of the pipeline.
        NotPartitionedError: there are no weights yet.
    """
    optimizer = getattr(engine.model, "optimizer", None)
    if optimizer is None:
        _write(engine, write)
        return
    is_first = engine.runtime.coordinates.dp_rank == 0
    state = collected_state(engine, optimizer, is_first) if is_first else {}

    def write_compiled() -> None:
        whole = with_state(engine, optimizer, state)
        with keras.compiled_like(wrapped, engine.model, whole):
            write()

    _write(engine, write_compiled)


def _write(engine: Any, write: Callable[[], Any]) -> None:
    runtime = engine.runtime
    _check(engine, "saved")
    if runtime.coordinates.dp_rank != 0:
        return
    writes = runtime.coordinates.pp_rank == 0
    borrowed = collected(engine, writes)
    try:
        failure = _failure(engine, write) if writes else None
    finally:
        for variable in borrowed:
            free(variable)
    _raise_everywhere(engine, failure, "written")


def read_weights(engine: Any, read: Callable[[], Any]) -> None:
    """Reads the weights, of which each process keeps its own. Collective: the pipeline.

    Args:
        engine: of the model.
        read: lets Keras read them.

    Raises:
        CheckpointError: it failed somewhere; on all processes of the pipeline.
        NotPartitionedError: there are no weights yet.
    """
    _check(engine, "loaded")
    try:
        with _without_optimizer(engine.model):
            failure = _failure(engine, read)
    finally:
        for variable in map(keras.variable_of, engine.everywhere()[1]):
            if not is_here(variable):
                free(variable)
    _raise_everywhere(engine, failure, "read")


def _check(engine: Any, what: str) -> None:
    if not engine.everywhere()[1]:
        raise NotPartitionedError(
            f"the model {engine.name} has no weights to be {what} before its first call in a step "
            "function, or its first batch in fit: do it after that, or in a function given to "
            "smp.register_post_partition_hook."
        )


def _failure(engine: Any, call: Callable[[], Any]) -> str | None:
    """Lets Keras see the whole model; returns why the call failed."""
    saved, engine.is_tracing = engine.is_tracing, True
    try:
        with engine.runtime.guard.suspended():
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.is_tracing = saved
    return None


@contextlib.contextmanager
def _without_optimizer(model: Any) -> Iterator[None]:
    """Within, the model has no optimizer, whose state is spread over processes as well."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        yield
        return
    model.optimizer = None
    try:
        yield
    finally:
        model.optimizer = optimizer


def _raise_everywhere(engine: Any, failure: str | None, done: str) -> None:
    failures = engine.runtime.communicator.allgather(failure, CommGroup.PP_GROUP)
    if any(failures):
        reason = next(each for each in failures if each)
        raise CheckpointError(f"the weights of {engine.name} could not be {done}: {reason}")
