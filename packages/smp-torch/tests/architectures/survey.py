"""Runs trials on one process and on several, side by side, and judges them.

A job runs many trials, since a start costs seconds. A trial that ends its job costs a restart at
the next one; a trial that hangs ends its job when its time is up.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from job import run_job, stack_of
from trial import Failure, Record, Trial
from verdict import Kind, Verdict, judge

from smdistributed.modelparallel.common.testing import RanksFailedError, run_ranks

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}
_POLL_SECONDS = 2.0


def config_of(num_ranks: int, *, tensor_parallel: bool = False) -> dict[str, object]:
    """Returns what ``smp.init`` is given."""
    if tensor_parallel and num_ranks > 1:
        return {"tensor_parallel_degree": num_ranks, "ddp": True, "microbatches": 1}
    return {"pipeline_parallel_degree": num_ranks, "microbatches": 2}


@dataclass(frozen=True)
class Job:
    """Trials on a number of ranks, and where they leave their records."""

    num_ranks: int
    trials: Sequence[Trial]
    directory: Path
    seconds: float
    tensor_parallel: bool = False

    def run(self) -> None:
        """Runs every trial that has no record yet, in as many jobs as it takes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        left = [trial for trial in self.trials if not self.is_done(trial)]
        while left:
            error = self._run(left)
            before, left = left, [trial for trial in left if not self.is_done(trial)]
            # The ranks take the trials in turn: the first one without records is to blame, unless
            # the one before it ended the job when it had written its own.
            if error is not None and left and not self._note(left[0], error) and left == before:
                raise error

    def _run(self, trials: Sequence[Trial]) -> RanksFailedError | None:
        try:
            run_ranks(
                self.num_ranks,
                run_job,
                launcher="python" if self.num_ranks == 1 else "smprun",
                timeout=60 + self.seconds * len(trials),
                env=ENVIRONMENT,
                args=[
                    config_of(self.num_ranks, tensor_parallel=self.tensor_parallel),
                    trials,
                    self.directory,
                    self.seconds,
                ],
            )
        except RanksFailedError as error:
            return error
        return None

    def _note(self, trial: Trial, error: RanksFailedError) -> bool:
        """Writes a record for each rank that could not; False if none has begun with the trial."""
        paths = self._paths(trial)
        if not any(path.exists() or stack_of(path).exists() for path in paths):
            return False
        for path in paths:
            if path.exists():
                continue
            stack = stack_of(path).read_text() if stack_of(path).exists() else ""
            if stack:
                failure = Failure("hang", f"no end within {self.seconds:g} s", stack)
            else:
                failure = Failure("died", str(error).splitlines()[0], str(error))
            path.write_bytes(pickle.dumps(Record(failure=failure)))
        return True

    def _paths(self, trial: Trial) -> list[Path]:
        return [self.directory / f"{trial.stem}.{rank}" for rank in range(self.num_ranks)]

    def is_done(self, trial: Trial) -> bool:
        """Whether every rank has left its record."""
        return all(path.exists() for path in self._paths(trial))

    def records(self, trial: Trial) -> list[Record]:
        """Returns what the ranks of a trial left."""
        return [pickle.loads(path.read_bytes()) for path in self._paths(trial)]


def survey(
    trials: Sequence[Trial],
    num_ranks: int,
    directory: Path,
    *,
    seconds: float = 100.0,
    on_verdict: Callable[[Trial, Verdict], None] = lambda trial, verdict: None,
    tensor_parallel: bool = False,
) -> dict[Trial, Verdict]:
    """Runs trials and judges each as soon as both sides have run it.

    Args:
        trials: what to run.
        num_ranks: processes of the distributed side.
        directory: keeps the records; a trial that has one is not run again.
        seconds: what a trial may take.
        on_verdict: told each verdict.
        tensor_parallel: split modules over the ranks by ``auto=True``; False: the model.

    A difference in float32 may be rounding, which a ReLU or a selection makes larger: such a trial
    is repeated in float64, and exact if it is exact there.
    """
    of = functools.partial(_survey, tensor_parallel=tensor_parallel)
    verdicts = of(trials, num_ranks, directory, seconds, on_verdict)
    doubtful = [trial for trial, verdict in verdicts.items() if verdict.differs]
    if doubtful:
        again = {replace(trial, in_double=True): trial for trial in doubtful}
        for double, verdict in of(list(again), num_ranks, directory, seconds).items():
            trial = again[double]
            if verdict.kind is Kind.EXACT:
                reason = f"in float64; in float32 {verdicts[trial].reason}"
                verdicts[trial] = replace(verdict, reason=reason)
                on_verdict(trial, verdicts[trial])
    return verdicts


def _survey(
    trials: Sequence[Trial],
    num_ranks: int,
    directory: Path,
    seconds: float,
    on_verdict: Callable[[Trial, Verdict], None] = lambda trial, verdict: None,
    *,
    tensor_parallel: bool,
) -> dict[Trial, Verdict]:
    reference = Job(1, trials, directory / "reference", seconds)
    distributed = Job(num_ranks, trials, directory / f"ranks-{num_ranks}", seconds, tensor_parallel)
    verdicts: dict[Trial, Verdict] = {}

    def look() -> None:
        for trial in trials:
            if trial in verdicts or not (reference.is_done(trial) and distributed.is_done(trial)):
                continue
            verdicts[trial] = judge(reference.records(trial)[0], distributed.records(trial))
            on_verdict(trial, verdicts[trial])

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(reference.run), pool.submit(distributed.run)]
        while wait(jobs, timeout=0).not_done:
            look()
            time.sleep(_POLL_SECONDS)
    for job in jobs:
        job.result()
    look()
    return verdicts
