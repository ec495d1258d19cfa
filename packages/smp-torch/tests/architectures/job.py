"""A job that runs many trials: what each rank does."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from architecture import AbsentError
from trial import Failure, InapplicableError, Record, Trial, Variant, run_trial

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import PartitionError, UnsupportedError

_COMMUNICATION_SECONDS = 40
#: What the other ranks get to note that they failed too, before a failing one ends the job.
_LAST_WORDS_SECONDS = 3


def start(config: Mapping[str, object]) -> None:
    """Starts the library in a process that is to run trials."""
    torch.set_num_threads(1)
    smp.init({"communication_timeout": _COMMUNICATION_SECONDS, **config})


def attempt(trial: Trial) -> Record:
    """Runs a trial; a failure is in the record."""
    record = Record()
    plain = smp.size() == 1 and trial.variant is Variant.NO_DROPOUT
    try:
        run_trial(trial, record, plain=plain)
    except AbsentError as error:
        record.failure = Failure("absent", str(error))
    except InapplicableError as error:
        record.failure = Failure("inapplicable", str(error))
    except (UnsupportedError, PartitionError) as error:
        record.failure = _failure("refused", error)
    except Exception as error:
        record.failure = _failure("crash", error)
    return record


def _failure(kind: str, error: Exception) -> Failure:
    return Failure(kind, f"{type(error).__name__}: {error}", traceback.format_exc())


def run_job(
    config: Mapping[str, object], trials: Sequence[Trial], directory: Path, seconds: float
) -> None:
    """Runs trials one after the other and leaves a record of each in ``directory``.

    A failure that is not the same on all ranks leaves them out of step and ends the job; so
    does the end of the time.

    Args:
        config: of ``smp.init``.
        trials: what to run.
        directory: where records go: ``<trial>.<rank>``.
        seconds: what a trial may take.
    """
    start(config)
    for trial in trials:
        path = directory / f"{trial.stem}.{smp.rank()}"
        with _time_out(stack_of(path), seconds):
            record = attempt(trial)
            _write(path, record)
            if record.failure and not _all_alike(directory, trial, record):
                os._exit(1)
            gc.collect()
            smp.barrier()


def _all_alike(directory: Path, trial: Trial, record: Record) -> bool:
    """Waits a moment for the other ranks; True if all fell over the same: they are in step."""
    paths = [directory / f"{trial.stem}.{rank}" for rank in range(smp.size())]
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    failures = [pickle.loads(path.read_bytes()).failure for path in paths]
    return all(each and each.reason == record.failure.reason for each in failures)


def stack_of(path: Path) -> Path:
    """Returns the file that exists while a trial runs, and holds its stacks if it hangs."""
    return path.with_suffix(f"{path.suffix}-stack")


def _write(path: Path, record: Record) -> None:
    partial = path.with_suffix(f"{path.suffix}-partial")
    partial.write_bytes(pickle.dumps(record))
    partial.rename(path)


@contextlib.contextmanager
def _time_out(path: Path, seconds: float) -> Iterator[None]:
    """Ends the process, with the stacks of its threads in a file, when the time is up."""
    with path.open("w") as file:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    path.unlink()
