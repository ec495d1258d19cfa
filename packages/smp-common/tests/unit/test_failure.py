from __future__ import annotations

import os

import pytest

from smdistributed.modelparallel.common import failure
from smdistributed.modelparallel.common.failure import FailureRecord

#: What a write to a pipe may have so that no other comes between its parts.
ATOMIC_BYTES = 4096


class _EndedError(Exception):
    pass


def record_of(summary: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, FailureRecord]:
    """Returns the line and the content of the record that a failing process leaves."""
    written: list[bytes] = []

    def write(_: int, data: bytes) -> int:
        written.append(data)
        return len(data)

    def end(code: int) -> None:
        raise _EndedError

    with monkeypatch.context() as patch:
        patch.setenv(failure.RECORDS_VARIABLE, "0.2")
        patch.setattr(os, "write", write)
        patch.setattr(os, "_exit", end)
        with pytest.raises(_EndedError):
            failure.leave(1, summary, 1)
    last = written[-1].decode()
    record = FailureRecord.parse(last)
    assert record is not None
    assert f"failed: {record.summary}" in written[-2].decode()
    return last, record


def test_a_long_message_keeps_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [f"parameter_{n} must be a number of at least {n}; got 'x' (str)." for n in range(9)]
    message = f"ConfigError: the configuration has 9 problem(s): {' '.join(problems)}"
    assert record_of(message, monkeypatch)[1].summary == message


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600", '"', "\udc80"])
def test_what_no_record_can_hold_loses_its_middle(
    letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, record = record_of(f"rule {letter * 20_000} fix", monkeypatch)
    assert len(line.encode()) <= ATOMIC_BYTES
    assert record.summary.startswith("rule ")
    assert record.summary.endswith(" fix")
    assert " ... " in record.summary
