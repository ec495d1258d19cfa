"""Which rank failed first, told from the ranks' own records and from what mpirun says.

A failure spreads: peers of a dead rank fail too, and mpirun ends the survivors with SIGTERM. The
user wants the origin.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from smdistributed.modelparallel.common.failure import FailureRecord
from smdistributed.modelparallel.common.names_of_ranks import listed

#: Why a job is final that ended for a reason from outside.
ASKED = "it was asked to end"
#: Why it is final, unless a host is gone, that mpirun starts nothing.
REFUSED = "mpirun has refused it"
_TERMINATED = 128 + signal.SIGTERM
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Banner:
    """What mpirun said about the process that it saw fail first.

    Attributes:
        rank: global rank.
        host: name of its host; empty where mpirun does not name it.
        signal_number: signal that killed it, or None.
        exit_code: code that it left with, or None.
        cause: other words for its end; empty where one of the two numbers says it.
    """

    rank: int
    host: str = ""
    signal_number: int | None = None
    exit_code: int | None = None
    cause: str = ""


@dataclass(frozen=True)
class Verdict:
    """How a job ended.

    Attributes:
        exit_code: smprun's own exit code.
        line: the last line for the user; empty when all is well.
        traceback_rank: the rank whose traceback explains it, or None.
        final_because: why another start would end likewise; empty where a rank was lost.
    """

    exit_code: int
    line: str = ""
    traceback_rank: int | None = None
    final_because: str = ""


_SIGNALLED = re.compile(
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on\s+"
    r"signal (?P<signal>\d+)"
)
_EXITED = re.compile(r"Process name: \[\S+,(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)")
_IMPROPER = re.compile(
    r"due to process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) "
    r"(?P<how>exiting\s+improperly|calling\s+\"abort\")"
)
#: A daemon that ends as its host is lost has, for mpirun, failed to come up.
_LOST = re.compile(
    r"lost communication with a remote daemon.*Remote daemon: \[\S+\] on node (\S+)"
    r"|A daemon failed to report back after being spawned.*Remote host:\s+(\S+)",
    re.DOTALL,
)
_CAUSES = {
    "exiting": "ended without MPI_Finalize while others communicate",
    "calling": "called MPI_Abort",
}


def parse_banner(text: str) -> Banner | None:
    """Returns what a block of mpirun's own output says about a failure, or None."""
    if match := _SIGNALLED.search(text):
        return Banner(int(match["rank"]), match["host"], signal_number=int(match["signal"]))
    if match := _EXITED.search(text):
        return Banner(int(match["rank"]), exit_code=int(match["code"]))
    if match := _IMPROPER.search(text):
        return Banner(int(match["rank"]), match["host"], cause=_CAUSES[match["how"].split()[0]])
    return None


def parse_lost_host(text: str) -> str:
    """Returns the host that a block of mpirun's own output says is lost, or an empty text."""
    match = _LOST.search(text)
    return match[1] or match[2] if match else ""


def judge(
    records: Sequence[FailureRecord],
    banners: Sequence[Banner],
    mpirun_code: int,
    hosts: Sequence[str],
    *,
    lost_host: str = "",
    is_refused: bool = False,
    ended: Collection[int] | None = None,
) -> Verdict:
    """Returns how a job ended that nobody asked to end.

    A record that blames nobody is the origin, the earliest first; then the process that mpirun
    names; then the rank at the end of the chain of blame, see ``_end_of_blame``. One exception:
    SIGKILL is never a consequence, so a rank that mpirun saw killed so, without a record, comes
    before everything (the kernel out of memory is the usual case, and its peers often cannot tell
    whom they lost). A host that mpirun has lost explains what no rank has done by itself.

    A rank that is lost leaves others that wait for it. Where each rank has failed by itself, none
    is lost, and the script will do so again.

    Args:
        records: of all ranks, in any order.
        banners: what mpirun said, in order.
        mpirun_code: mpirun's exit code.
        hosts: host of each rank, as the user named it.
        lost_host: to which mpirun has lost its connection; it may end with exit code 0 then.
        is_refused: whether mpirun has said something and no rank has.
        ended: the ranks that have said that they came to their end; None where that is not known.
    """
    records = sorted(records, key=lambda record: record.time_seconds)
    origins = [record for record in records if not record.blamed_ranks]
    # A handler of SIGTERM may leave a record; it is a consequence.
    own = [record for record in origins if record.exit_code != _TERMINATED] or origins
    with_record = {record.rank for record in records}
    seen = [b for b in banners if b.signal_number != signal.SIGTERM] or list(banners)
    banner = seen[0] if seen else None
    if banner is not None and banner.rank in with_record:
        banner = None
    if banner is not None and banner.signal_number == signal.SIGKILL:
        return _of_banner(banner, mpirun_code, hosts)
    if not own or own[0].exit_code == _TERMINATED:
        if lost_host:
            return _of_lost_host(lost_host, mpirun_code)
        if banner is not None:
            return _of_banner(banner, mpirun_code, hosts)
    if own:
        verdict = _of_record(own[0])
        if len({record.rank for record in own}) == len(hosts):
            verdict = replace(verdict, final_because="each rank failed by itself")
        return verdict
    if records:
        # A record says more of its rank than the code that it left with.
        telling = [b for b in banners if b.exit_code is None or b.rank not in with_record]
        return _of_blame(*_end_of_blame(records), telling, mpirun_code, hosts)
    if mpirun_code:
        return Verdict(
            _exit_code(mpirun_code),
            f"mpirun ended with {_ending(mpirun_code)}",
            # Nor does mpirun kill what it refuses; it may have warned of something before.
            final_because=REFUSED if is_refused and mpirun_code != _KILLED else "",
        )
    if ended is not None and len(set(hosts)) > 1:
        silent = [rank for rank in range(len(hosts)) if rank not in ended]
        if silent:
            return Verdict(
                1, f"{listed(silent)} did not come to an end: a host was lost (exit code 1)"
            )
    return Verdict(0)


def ended_by(number: int) -> Verdict:
    """Returns how a job ends on a signal to smprun."""
    code = 128 + number
    line = f"ended by {signal_name(number)} (exit code {code})"
    return Verdict(code, line, final_because=ASKED)


def signal_name(number: int) -> str:
    """Returns ``SIGKILL`` for 9; ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _of_record(record: FailureRecord) -> Verdict:
    return Verdict(
        record.exit_code,
        f"rank {record.rank} ({record.host}) failed first: {record.summary} "
        f"(exit code {record.exit_code})",
        # Nothing is printed for sys.exit, and an older traceback would mislead.
        None if record.summary.startswith("sys.exit(") else record.rank,
    )


def _end_of_blame(records: Sequence[FailureRecord]) -> tuple[FailureRecord, tuple[int, ...]]:
    """Follows the blame from the earliest record to ranks that have said nothing themselves.

    Who blames others has failed because of them: the peer of a peer of a dead rank blames one that
    is a victim too. And who sees only that somebody of a group is missing blames the whole group.

    Returns:
        the record that the chain ends with, and whom it blames.
    """
    by_rank = {record.rank: record for record in reversed(records)}
    record, passed = records[0], {records[0].rank}
    while True:
        silent = tuple(rank for rank in record.blamed_ranks if rank not in by_rank)
        if silent:
            return record, silent
        others = [by_rank[rank] for rank in record.blamed_ranks if rank not in passed]
        if not others:  # they blame each other: the one that spoke first knows best
            return records[0], records[0].blamed_ranks
        record = min(others, key=lambda other: other.time_seconds)
        passed.add(record.rank)


def _of_blame(
    record: FailureRecord,
    blamed: Sequence[int],
    banners: Sequence[Banner],
    mpirun_code: int,
    hosts: Sequence[str],
) -> Verdict:
    if found := [banner for banner in banners if banner.rank in blamed]:
        return _of_banner(found[0], mpirun_code, hosts)
    silent = listed(sorted(blamed))
    return Verdict(
        record.exit_code,
        f"{silent} did not answer: {record.summary} (noticed by rank {record.rank})",
        record.rank,
    )


def _of_banner(banner: Banner, mpirun_code: int, hosts: Sequence[str]) -> Verdict:
    host = banner.host or (hosts[banner.rank] if banner.rank < len(hosts) else "unknown host")
    who = f"rank {banner.rank} ({host})"
    if banner.signal_number is not None:
        number = banner.signal_number
        name = signal_name(number)
        return Verdict(128 + number, f"{who} was killed by signal {number} ({name})")
    code = banner.exit_code or _exit_code(mpirun_code) or 1
    if banner.exit_code is not None:
        return Verdict(code, f"{who} failed first: exit code {code}")
    return Verdict(code, f"{who} failed first: {banner.cause} (exit code {code})")


def _of_lost_host(host: str, mpirun_code: int) -> Verdict:
    code = _exit_code(mpirun_code) or 1
    return Verdict(code, f"host {host} was lost: mpirun cannot reach it (exit code {code})")


def _exit_code(returncode: int) -> int:
    """Returns the shell's exit code for a ``Popen.returncode``."""
    return returncode if returncode >= 0 else 128 - returncode


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"signal {-returncode} ({signal_name(-returncode)})"
    return f"exit code {returncode}"
