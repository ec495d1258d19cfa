"""What a rank tells its launcher arrives whatever a script has put in the place of its stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.config.announced import announced
from smdistributed.modelparallel.common.failure import FailureRecord
from smdistributed.modelparallel.common.launcher.ending import HEARD
from smdistributed.modelparallel.common.whereabouts import Whereabouts

_SCRIPT = """
import os, signal, sys
os.environ.update(SMP_FAILURE_RECORDS="0.01", SMP_ANNOUNCE_CONFIGURATION="1")
from smdistributed.modelparallel.common import failure, first_stderr, whereabouts
from smdistributed.modelparallel.common.config.announced import announce
from smdistributed.modelparallel.common.config.loading import load
from smdistributed.modelparallel.common.launcher.ending import EndRequest

first_stderr.keep()
exec(sys.argv[1])
announce(load("pytorch", {"pipeline_parallel_degree": 2}), 0)
whereabouts.answer(0)
signal.signal(signal.SIGTERM, lambda *_: None)
EndRequest().come()
failure.leave(0, "it broke", 3, details="the traceback\\n")
"""
_FILE = "os.open('errors', os.O_WRONLY | os.O_CREAT)"


@pytest.mark.parametrize(
    ("replaced", "in_file"),
    [
        ("", ""),
        ("os.close(2)", ""),
        (f"os.dup2({_FILE}, 2)", "the traceback\n"),
        # What has the number of the one that was kept is another file then.
        (f"os.closerange(3, 20); [{_FILE} for _ in range(20)]", ""),
    ],
)
def test_a_launcher_is_told_of_all(tmp_path: Path, replaced: str, in_file: str) -> None:
    command = [sys.executable, "-c", _SCRIPT, replaced]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 3
    lines = done.stderr.split("\n")  # marks are breaks of lines for splitlines()
    assert [given for line in lines if (given := announced(line))] == [
        {"pipeline_parallel_degree": 2}
    ]
    assert sum(Whereabouts.parse(line) is not None for line in lines) == 1
    assert lines.count(HEARD) == 1
    assert lines.count("the traceback") == 1
    assert [r.summary for line in lines if (r := FailureRecord.parse(line))] == ["it broke"]
    errors = tmp_path / "errors"
    assert (errors.read_text() if errors.exists() else "") == in_file
