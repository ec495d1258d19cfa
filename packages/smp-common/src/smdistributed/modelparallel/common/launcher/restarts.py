"""Starts a job again after it has lost a rank; the script goes on from its newest checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from smdistributed.modelparallel.common.config.announced import ANNOUNCED_VARIABLE
from smdistributed.modelparallel.common.failure import RECORDS_VARIABLE
from smdistributed.modelparallel.common.launcher.command import (
    MAX_RESTARTS_VARIABLE,
    RESTART_COUNT_VARIABLE,
)
from smdistributed.modelparallel.common.launcher.elastic import NoPlaceError
from smdistributed.modelparallel.common.launcher.first_failure import REFUSED, Verdict, ended_by
from smdistributed.modelparallel.common.launcher.job import ENDING

#: Other hosts find out that mpirun has ended, and end their ranks, which hold the GPUs.
_PAUSE_SECONDS = 2.0
#: A rank that fails gives the others this time to fail by themselves, see ``first_failure.judge``.
_OTHERS_SECONDS = "1"


class _EndedError(Exception):
    """A signal came that ends the job."""

    def __init__(self, number: int) -> None:
        self.verdict = ended_by(number)


def run(
    attempt: Callable[[Mapping[str, str]], Verdict], most: int, renew: Callable[[], str]
) -> int:
    """Runs a job until it ends well, or another start would be of no use, or none is left.

    Args:
        attempt: runs the job from its start to its end, with further variables.
        most: how often it may be started again.
        renew: finds hosts for the next attempt; returns what has changed, in words. Raises
            NoPlaceError where there are too few.

    Returns:
        smprun's exit code, that of the last attempt.
    """
    try:
        with _raising():
            for number in itertools.count():
                verdict, changed = attempt(_variables(number, most)), ""
                if verdict.final_because == REFUSED and number < most and (changed := renew()):
                    verdict = replace(verdict, final_because="")
                is_over = not verdict.exit_code or verdict.final_because or number == most
                _say(verdict.line + (_why_over(verdict, most) if is_over else ""))
                if is_over:
                    return verdict.exit_code
                which = f"restart {number + 1} of {most}"
                _say(f"{which} in {_PAUSE_SECONDS:g} s")
                time.sleep(_PAUSE_SECONDS)
                if changed := changed or renew():
                    _say(f"{which}: {changed}")
    except NoPlaceError as error:
        _say(f"not started again: {error}")
        return verdict.exit_code
    except _EndedError as ended:
        _say(ended.verdict.line)
        return ended.verdict.exit_code
    raise AssertionError("a job is started at most so often")


def _variables(number: int, most: int) -> dict[str, str]:
    if not most:
        return {}
    return {
        RESTART_COUNT_VARIABLE: str(number),
        MAX_RESTARTS_VARIABLE: str(most),
        RECORDS_VARIABLE: _OTHERS_SECONDS,
        ANNOUNCED_VARIABLE: "1",
    }


def _why_over(verdict: Verdict, most: int) -> str:
    if not most or not verdict.exit_code:
        return ""
    if verdict.final_because:
        return f"; not started again: {verdict.final_because}"
    return f"; no restart is left of {most}"


@contextlib.contextmanager
def _raising() -> Iterator[None]:
    """Has signals end this process by an exception; while a job runs, they are the job's."""
    handlers = {
        number: signal.signal(number, _on_signal)
        for number in ENDING
        # Ignored signals stay ignored, as under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise _EndedError(number)


def _say(line: str) -> None:
    if line:
        sys.stderr.write(f"smprun: {line}\n")
        sys.stderr.flush()
