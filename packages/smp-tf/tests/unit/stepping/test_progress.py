"""Long work says what it is at; short work says nothing."""

from __future__ import annotations

import threading
import time

import pytest

from smdistributed.modelparallel.tensorflow.stepping import progress
from smdistributed.modelparallel.tensorflow.stepping.progress import Progress


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.05)


def _work(stages: tuple[str, ...], seconds: float, is_shown: bool = True) -> None:
    with Progress("building", is_shown) as shown:
        for stage in stages:
            shown.stage = stage
            time.sleep(seconds)


def test_each_stage_is_named_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    _work(("first", "second"), 0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("smp: building, 0 s: first")
    assert lines[-1].endswith("second")


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _work(("first",), 0.0)
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_one_process_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    _work(("first",), 0.2, is_shown=False)
    assert capsys.readouterr().err == ""


def test_an_error_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Progress("building", is_shown=True):
        raise KeyError
    time.sleep(0.1)
    assert all(thread.name != "smp-progress" for thread in threading.enumerate())
    assert capsys.readouterr().err == ""
