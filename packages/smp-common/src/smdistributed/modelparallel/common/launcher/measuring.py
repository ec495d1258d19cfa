"""Running lines of a plan for some steps, to see what they take."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.search.measurement import (
    MEASURE_VARIABLE,
    Measured,
    Wanted,
)

#: A line that takes longer is given up.
_SECONDS = 1800
#: Of what a job that failed has printed.
_LAST_LINES = 5


def measured(command: Sequence[str], step: str, environ: Mapping[str, str]) -> Measured:
    """Runs a job for some steps, and returns what they have taken.

    Args:
        command: that starts it, by ``smprun``.
        step: name of its step function.
        environ: environment of the launcher.

    Raises:
        SMPError: the job fails, or ends after too few steps.
    """
    words = ["-m", "smdistributed.modelparallel.common.launcher", "--timeout", str(_SECONDS)]
    with tempfile.TemporaryDirectory(prefix="smp-measure-") as folder:
        wanted = Wanted(os.path.join(folder, "steps"), step)
        done = subprocess.run(
            [sys.executable, *words, *command[1:]],
            env={**environ, MEASURE_VARIABLE: wanted.to_variable()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = Measured.read(Path(wanted.file))
    if found is not None and not done.returncode:
        return found
    last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
    what = f"failed with exit code {done.returncode}" if done.returncode else "ended before"
    raise SMPError(
        f"a line is measured by {wanted.calls} calls of {step}; {shlex.join(command)} {what}: "
        f"have the script make more calls, or mend what it says.\n{last}"
    )
