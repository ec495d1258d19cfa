"""A job is asked, while it runs, where its ranks are."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import held_job
import pytest
from torch.distributed.flight_recorder import fr_trace

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

SMPRUN = [sys.executable, "-m", "smdistributed.modelparallel.common.launcher"]
#: Rank 0 waits within an action for what the layer of rank 1 computes.
IN_A_STEP = r"""rank 0 \(\S+\): \S+held_job.py:\d+ in <module>: train_step\(model, .*
  for \d+ s: action B0@0: backward of microbatch 0
  for \d+ s: receiving from rank 1
rank 1 \(\S+\): \S+held_job.py:\d+ in hold: time.sleep\(0.05\)
  for \d+ s: action F0@1: forward of microbatch 0
"""


def until(stream: IO[str], words: str) -> None:
    while words not in (line := stream.readline()):
        assert line, f"the job has ended before it said {words!r}"


def told_by(job: subprocess.Popen[str], *options: str) -> str:
    words = [*SMPRUN, "--status", str(job.pid), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def test_each_rank_says_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [*SMPRUN, "--fork", "-n", "2", held_job.__file__, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as job:
        try:
            until(job.stdout, "waits for on")
            shown = told_by(job, "--flight-recorder", str(tmp_path / "in a step"))
            assert re.fullmatch(IN_A_STEP, shown)
            (tmp_path / "on").touch()
            until(job.stdout, "waits for never")
            while "smp.barrier()" not in told_by(job):  # rank 0 ends its step
                time.sleep(0.1)
            job.send_signal(signal.SIGQUIT)  # the same on the job's own stderr
            until(job.stderr, "in <module>: smp.barrier()")
            assert "barrier(WORLD), waits for rank 1" in job.stderr.readline()
            told_by(job, "--flight-recorder", str(tmp_path / "at the barrier"))
            assert job.stderr.readline().startswith("rank 1 (")
        finally:
            job.terminate()
        assert "smprun: ended by SIGTERM" in job.communicate(timeout=30)[1]

    for name, what in (
        ("in a step", ["tensors [ranks 0-1]", "gloo:recv 0<-1"]),
        ("at the barrier", ["barrier(WORLD) [ranks 0-1]", "gloo:barrier"]),
    ):
        assert analyzed(tmp_path / name, caplog) == [*what, "{1}"]


def analyzed(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns of which exchange PyTorch's own analyzer says that ranks miss, and which."""
    caplog.clear()
    with caplog.at_level("INFO"):
        fr_trace.main([str(folder)])
    said = [record.getMessage() for record in caplog.records]
    assert sum("Not all ranks joining collective" in text for text in said) == 1, said
    facts = dict(text.split(": ", 1) for text in said if ": " in text)
    return [facts[each] for each in ("group info", "collective", "missing ranks")]
