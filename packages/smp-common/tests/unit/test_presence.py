from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

from smdistributed.modelparallel.common.comm.presence import Presence, absent

WAITS = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"


def test_the_states_of_a_process() -> None:
    own = Presence.own()
    assert own.state == "running"
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        child.stdout.read(1)
        words = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        started = words[19]
        other = Presence(own.machine, child.pid, started)
        assert other.state == "running"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert other.state == "stopped"
        assert absent([own, other], [0, 1]) == {1: "stopped"}
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert other.state == "ended"  # a zombie
        child.wait()
    assert other.state == "ended"
    assert absent([own, other], [0]) == {}


def test_a_process_id_that_came_again_is_another_process() -> None:
    assert dataclasses.replace(Presence.own(), started="1").state == "ended"


def test_nothing_is_known_of_another_machine() -> None:
    assert dataclasses.replace(Presence.own(), machine="elsewhere").state == "unknown"
    assert Presence("", os.getpid(), "1").state == "unknown"
