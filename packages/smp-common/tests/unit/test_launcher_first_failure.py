from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.failure import FailureRecord
from smdistributed.modelparallel.common.launcher.first_failure import (
    REFUSED,
    Banner,
    Verdict,
    judge,
    parse_banner,
    parse_lost_host,
)

HOSTS = ("a", "a", "b", "b")
KILLED = """prterun noticed that process rank 1 with PID 2932 on node vm exited on
signal 9 (Killed)."""
EXITED = """prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-2946@1,1]
   Exit code:    7"""
IMPROPER = """prterun has exited due to process rank 1 with PID 6674 on node vm exiting
improperly. There are three reasons this could occur:"""
ABORTED = """prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be"""


def record(
    rank: int, time: float, *, code: int = 1, blamed: tuple[int, ...] = (), summary: str = "boom"
) -> FailureRecord:
    return FailureRecord(rank, "vm", code, summary, blamed, time)


LOST = """PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-vm-18841@0,0] on node vm
  Remote daemon: [prterun-vm-18841@0,1] on node far"""


FAILED = """A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable.

  Local host:    vm
  Remote host:   far
  Daemon exit status: 0"""


@pytest.mark.parametrize(
    ("text", "banner"),
    [
        (KILLED, Banner(1, "vm", signal_number=9)),
        (EXITED, Banner(1, exit_code=7)),
        (IMPROPER, Banner(1, "vm", cause="ended without MPI_Finalize while others communicate")),
        (ABORTED, Banner(1, "vm", cause="called MPI_Abort")),
        ("There are not enough slots available", None),
    ],
)
def test_parse_banner(text: str, banner: Banner | None) -> None:
    assert parse_banner(text) == banner


def line(
    records: list[FailureRecord], banners: list[Banner] | None = None, code: int = 1
) -> tuple[int, str]:
    verdict = judge(records, banners or [], code, HOSTS)
    return verdict.exit_code, verdict.line


def test_all_is_well() -> None:
    assert judge([], [], 0, HOSTS) == Verdict(0)


def test_the_earliest_record_that_blames_nobody() -> None:
    records = [record(0, 1.0, blamed=(1,)), record(2, 3.0), record(1, 2.0, code=3)]
    assert line(records) == (3, "rank 1 (vm) failed first: boom (exit code 3)")


def test_a_record_comes_before_what_mpirun_says() -> None:
    banner = Banner(0, "a", signal_number=6)
    assert line([record(1, 1.0)], [banner])[1].startswith("rank 1 (vm) failed first")


def test_a_rank_killed_by_sigkill_comes_before_its_peers_records() -> None:
    expected = (137, "rank 1 (a) was killed by signal 9 (SIGKILL)")
    assert line([record(0, 1.0)], [Banner(1, "a", signal_number=9)]) == expected


def test_what_mpirun_says_comes_before_blame() -> None:
    code, text = line([record(0, 1.0, blamed=(1,))], [Banner(1, "a", signal_number=11)])
    assert (code, text) == (139, "rank 1 (a) was killed by signal 11 (SIGSEGV)")


def test_the_blamed_rank_is_named() -> None:
    text = "rank 1 did not answer: boom (noticed by rank 0)"
    assert line([record(2, 2.0, blamed=(0,)), record(0, 1.0, blamed=(1,))]) == (1, text)
    several = line([record(0, 1.0, blamed=(1, 3))])[1]
    assert several == "ranks 1, 3 did not answer: boom (noticed by rank 0)"


def test_the_chain_of_blame_is_followed_to_its_end() -> None:
    records = [
        record(0, 1.0, blamed=(2,), summary="saw 2"),
        record(2, 1.1, blamed=(0, 1, 3), summary="saw somebody"),
        record(3, 1.2, blamed=(2,), summary="saw 2"),
    ]
    assert line(records)[1] == "rank 1 did not answer: saw somebody (noticed by rank 2)"
    # The process that mpirun names is one of them.
    terminated = Banner(1, "a", signal_number=15)
    for banners in ([terminated], [terminated, Banner(0, exit_code=1)]):
        assert line(records, banners) == (143, "rank 1 (a) was killed by signal 15 (SIGTERM)")


def test_of_ranks_that_blame_each_other_the_first_is_right() -> None:
    records = [record(0, 1.0, blamed=(1,)), record(1, 1.1, blamed=(0,))]
    assert line(records)[1] == "rank 1 did not answer: boom (noticed by rank 0)"


def test_the_code_that_one_of_them_left_with_says_less() -> None:
    records = [record(1, 1.0, blamed=(0,), summary="saw 0"), record(0, 1.1, blamed=(1,))]
    text = "rank 0 did not answer: saw 0 (noticed by rank 1)"
    assert line(records, [Banner(0, exit_code=1)]) == (1, text)


def test_the_noticer_that_mpirun_names_is_not_the_origin() -> None:
    text = line([record(0, 1.0, blamed=(1,))], [Banner(0, exit_code=1)])[1]
    assert text.startswith("rank 1 did not answer")


def test_survivors_that_mpirun_terminated_are_consequences() -> None:
    banners = [Banner(0, "a", signal_number=15), Banner(1, exit_code=7)]
    assert line([], banners, 7) == (7, "rank 1 (a) failed first: exit code 7")
    # A handler of SIGTERM leaves a record with its code.
    assert line([record(0, 1.0, code=143)], banners, 7)[0] == 7


def test_the_host_comes_from_the_placement_where_mpirun_names_none() -> None:
    assert line([], [Banner(2, exit_code=7)], 7)[1] == "rank 2 (b) failed first: exit code 7"


def test_mpiruns_own_failure() -> None:
    assert line([], code=66) == (66, "mpirun ended with exit code 66")
    assert line([], code=-9) == (137, "mpirun ended with signal 9 (SIGKILL)")


def test_only_an_exception_has_a_traceback() -> None:
    assert judge([record(1, 1.0)], [], 1, HOSTS).traceback_rank == 1
    assert judge([record(1, 1.0, summary="sys.exit(7)")], [], 7, HOSTS).traceback_rank is None


def test_what_each_rank_fails_by_is_no_loss_of_a_rank() -> None:
    everyone = [record(rank, 1.0 + rank) for rank in range(len(HOSTS))]
    assert judge(everyone, [], 1, HOSTS).final_because
    assert not judge(everyone[:-1], [], 1, HOSTS).final_because
    waits = record(3, 5.0, blamed=(0, 1, 2))
    assert not judge([*everyone[:-1], waits], [], 1, HOSTS).final_because


def test_a_lost_host_explains_what_no_rank_has_done() -> None:
    host = parse_lost_host(LOST)
    waits = record(0, 1.0, blamed=(2, 3))
    for records in ([], [waits]):
        verdict = judge(records, [], 0, HOSTS, lost_host=host)
        assert verdict == Verdict(1, "host far was lost: mpirun cannot reach it (exit code 1)")
    assert judge([record(1, 1.0)], [], 0, HOSTS, lost_host=host).line.startswith("rank 1")
    assert parse_lost_host(FAILED) == "far"


def test_a_job_that_was_killed_before_a_word_was_not_refused() -> None:
    assert judge([], [], 1, HOSTS, is_refused=True).final_because == REFUSED
    assert judge([], [], 137, HOSTS, is_refused=True).final_because == ""


def test_ranks_that_never_ended_were_lost_even_where_mpirun_says_that_all_is_well() -> None:
    verdict = judge([], [], 0, HOSTS, ended={0, 1})
    assert verdict == Verdict(1, "ranks 2-3 did not come to an end: a host was lost (exit code 1)")
    assert judge([], [], 0, HOSTS, ended={0, 1, 2, 3}) == Verdict(0)
    # On one host mpirun sees each process end, whatever that runs.
    assert judge([], [], 0, ("a", "a"), ended=set()) == Verdict(0)
