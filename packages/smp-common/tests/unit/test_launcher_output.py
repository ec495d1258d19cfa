from __future__ import annotations

import io
import itertools

import pytest

from smdistributed.modelparallel.common.config import load
from smdistributed.modelparallel.common.config.announced import ANNOUNCED_VARIABLE, announce
from smdistributed.modelparallel.common.failure import FailureRecord
from smdistributed.modelparallel.common.launcher.first_failure import Banner
from smdistributed.modelparallel.common.launcher.output import (
    LineAssembler,
    Relay,
    Screen,
)

RULE = b"-" * 74 + b"\n"


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


class Shown:
    def __init__(self, num_ranks: int = 2, stream: type[io.BytesIO] = io.BytesIO) -> None:
        self.out, self.err = stream(), stream()
        self.relay = Relay(Screen(self.out, self.err, num_ranks))

    def feed(self, rank: int, data: bytes, *, err: bool = False) -> None:
        name = b"stderr" if err else b"stdout"
        self.relay.feed(err, b"[1,%d]<%s>: " % (rank, name) + data)


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [(b"one", b"\n"), (b"two", b"\n")]),
        ([b"on", b"e\nt", b"wo"], [(b"one", b"\n")]),
        ([b"one\r\ntwo\r", b"\n"], [(b"one", b"\n"), (b"two", b"\n")]),
        ([b"\r1%\r2%", b"\r", b"3%\n"], [(b"1%", b"\r"), (b"2%", b"\r"), (b"3%", b"\n")]),
        ([b"\n\n"], [(b"", b"\n"), (b"", b"\n")]),
    ],
)
def test_lines(pieces: list[bytes], lines: list[tuple[bytes, bytes]]) -> None:
    assembler = LineAssembler()
    assert [line for piece in pieces for line in assembler.feed(piece)] == lines


def test_a_progress_bar_shows_its_present_state_once() -> None:
    assembler = LineAssembler()
    assert not list(assembler.feed(b"\r10%"))
    assert assembler.preview() == b"10%"
    assert assembler.preview() == b""
    assert list(assembler.feed(b"\r20%")) == []
    assert assembler.preview() == b"20%"
    assert list(assembler.feed(b"\n")) == [(b"20%", b"\n")]


def test_a_plain_partial_line_waits() -> None:
    assembler = LineAssembler()
    assert not list(assembler.feed(b"loading ..."))
    assert assembler.preview() == b""
    assert assembler.rest() == b"loading ..."


def test_each_line_carries_its_rank_and_keeps_its_stream() -> None:
    shown = Shown(num_ranks=11)
    shown.feed(10, b"a\nb\n")
    shown.feed(2, b"c\n", err=True)
    assert shown.out.getvalue() == b"[10] a\n[10] b\n"
    assert shown.err.getvalue() == b"[ 2] c\n"


def test_interleaved_pieces_of_long_lines_are_put_together() -> None:
    shown = Shown()
    for _ in range(50):
        for rank in (0, 1):
            shown.feed(rank, str(rank).encode() * 4096)
    shown.feed(0, b"\n")
    shown.feed(1, b"\n")
    assert shown.out.getvalue() == b"[0] " + b"0" * 204800 + b"\n[1] " + b"1" * 204800 + b"\n"


def test_text_that_looks_like_a_tag_stays_text() -> None:
    shown = Shown()
    shown.feed(0, b"[1,1]<stdout>: mine\n[1,1]<stdout>: too\n")
    assert shown.out.getvalue() == b"[0] [1,1]<stdout>: mine\n[0] [1,1]<stdout>: too\n"


def test_what_is_left_is_shown_at_the_end() -> None:
    shown = Shown()
    shown.feed(0, b"no newline")
    assert shown.out.getvalue() == b""
    shown.relay.finish()
    assert shown.out.getvalue() == b"[0] no newline\n"


def test_bytes_that_are_no_text_pass() -> None:
    shown = Shown()
    shown.feed(0, b"\xff\xfe\n")
    assert shown.out.getvalue() == b"[0] \xff\xfe\n"


def test_records_are_kept_and_not_shown() -> None:
    shown = Shown()
    record = FailureRecord(1, "vm", 7, "sys.exit(7)", (), 1.5)
    shown.feed(1, b"before\n" + record.line().encode() + b"\nafter\n", err=True)
    assert shown.relay.records == [record]
    assert shown.err.getvalue() == b"[1] before\n[1] after\n"


@pytest.mark.parametrize("forged", ["{}", "[]", '{"blamed_ranks": []}', "no json"])
def test_what_only_begins_as_a_record_is_shown(forged: str) -> None:
    shown = Shown()
    line = f"\x1esmp-failure {forged}\n".encode()
    shown.feed(1, line, err=True)
    assert shown.relay.records == []
    assert shown.err.getvalue() == b"[1] " + line


def test_known_banners_are_kept_and_others_shown() -> None:
    shown = Shown()
    known = b"prterun noticed that process rank 1 with PID 3 on node vm exited on\nsignal 9 (K).\n"
    unknown = RULE + b"There are not enough slots.\n" + RULE
    for line in (RULE + known + RULE + unknown).splitlines(keepends=True):
        shown.relay.feed(True, line)
    assert shown.relay.banners == [Banner(1, "vm", signal_number=9)]
    assert shown.err.getvalue() == unknown


def test_a_message_of_mpirun_without_rules_is_shown_at_once() -> None:
    shown = Shown()
    shown.relay.feed(True, b"mpirun: something odd\n")
    assert shown.err.getvalue() == b"mpirun: something odd\n"


def test_a_rank_may_print_a_rule() -> None:
    shown = Shown()
    shown.feed(0, RULE, err=True)
    assert shown.err.getvalue() == b"[0] " + RULE


def test_a_lost_host_is_told_by_mpirun_only_where_no_rank_has_come() -> None:
    block = (
        b"A daemon failed to report back after being spawned.\n",
        b"  Remote host:   far\n",
        RULE,
    )
    for has_come, is_err in itertools.product((False, True), repeat=2):
        shown = Shown()
        if has_come:
            shown.feed(0, b"\x1esmp-ended\n", err=True)
        for line in (RULE, *block):
            shown.relay.feed(is_err, line)
        assert shown.relay.lost_host == "far"
        assert shown.relay.ended == ({0} if has_come else set())
        text = b"" if has_come else b"".join((RULE, *block))
        assert (shown.err if is_err else shown.out).getvalue() == text


def test_an_unfinished_message_is_shown_at_the_end() -> None:
    shown = Shown()
    shown.relay.feed(True, RULE + b"lost\n")
    shown.relay.finish()
    assert shown.err.getvalue() == RULE + b"lost\n"


def test_the_prefix_is_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = Shown(stream=Terminal)
    shown.feed(0, b"a\n")
    assert shown.out.getvalue() == b"\x1b[36m[0]\x1b[0m a\n"
    monkeypatch.setenv("NO_COLOR", "1")
    shown = Shown(stream=Terminal)
    shown.feed(0, b"a\n")
    assert shown.out.getvalue() == b"[0] a\n"


def test_a_line_erases_the_bar_that_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = Shown(stream=Terminal)
    shown.feed(0, b"\r50% and long")
    shown.relay.idle()
    shown.feed(1, b"short\nnext\n")
    assert shown.out.getvalue() == b"[0] 50% and long\r\x1b[K[1] short\n[1] next\n"


def test_each_error_is_shown_once_and_the_origin_last() -> None:
    shown = Shown(num_ranks=4)
    for rank, words in enumerate((b"T\nKeyError: 1\n", b"T\nOSError\n", b"T\nKeyError: 1\n")):
        shown.feed(rank, b"\x1esmp-last-words 2\n" + words + b"rank failed\n", err=True)
    shown.feed(3, b"goes on\n", err=True)
    at_once = b"[0] rank failed\n[1] rank failed\n[2] rank failed\n[3] goes on\n"
    assert shown.err.getvalue() == at_once
    shown.relay.show_last_words(2)
    shown.relay.show_last_words(2)
    last = b"[1] T\n[1] OSError\n[2] T\n[2] KeyError: 1\n"
    assert shown.err.getvalue() == at_once + last


def test_what_rank_0_tells_of_its_configuration_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load("pytorch", {"pipeline_parallel_degree": 2})
    announce(config, 0)
    monkeypatch.setenv(ANNOUNCED_VARIABLE, "1")
    announce(config, 1)
    assert capfd.readouterr().err == ""
    announce(config, 0)
    shown, told = Shown(), []
    shown.relay.on_configuration = told.append
    shown.feed(0, capfd.readouterr().err.encode(), err=True)
    assert told == [{"pipeline_parallel_degree": 2}]
    other = b"\x1esmp-configuration of my own\n"
    shown.feed(0, other, err=True)
    assert shown.err.getvalue() == b"[0] " + other
