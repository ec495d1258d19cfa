"""What a rank says at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from smdistributed.modelparallel.common.launcher.ending import ENDED

_BEGINNING = (
    "import os\n"
    "from smdistributed.modelparallel.common import first_stderr\n"
    "from smdistributed.modelparallel.common.launcher.ending import say_at_end\n"
    "first_stderr.keep()\n"
    "say_at_end()\n"
)
_SILENCE = "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)"


def said(words: str) -> str:
    """Returns the stderr of a rank whose script is these words."""
    command = [sys.executable, "-c", _BEGINNING + words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


@pytest.mark.parametrize(
    "words",
    [
        "",
        "os._exit(0)",
        "raise SystemExit(3)",
        _SILENCE,
        f"{_SILENCE}; os._exit(0)",
        "os.close(2)",
        "if os.fork(): os.wait()",
    ],
)
def test_a_rank_says_once_that_it_ends_whatever_became_of_its_stderr(words: str) -> None:
    assert said(words).count(f"{ENDED}\n") == 1


def test_a_rank_that_is_killed_says_nothing() -> None:
    assert ENDED not in said("os.kill(os.getpid(), 9)")


@pytest.mark.timeout(60)
def test_a_child_that_goes_on_does_not_hold_the_stderr_of_a_rank() -> None:
    # It goes on until its input ends, which is not before the stderr has.
    words = f"if not os.fork(): {_SILENCE}; os.read(0, 1)"
    command = [sys.executable, "-c", _BEGINNING + words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.stderr is not None
        assert ENDED.encode() in rank.stderr.read()
