"""The fault series: whoever fails, in a job with replicas too, is the one that is blamed.

All of it is marked slow; ``nox -s long -- failures`` runs it; a further ``-s``
prints a table.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_lines import launch_line

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(200)]

JOB = Path(__file__).parent / "series_job.py"
FAULTS = ("kill", "stop", "terminate", "exception", "exit", "silent-exit")
LAUNCHERS = ("mpirun", "torchrun", "smprun")
#: (processes, the one that fails)
CULPRITS = ((2, 0), (2, 1), (4, 0), (4, 3))
PLACES = ("step", "update")
SERIES = list(itertools.product(FAULTS, LAUNCHERS, CULPRITS, PLACES))
#: The last of these says whom the launcher takes for the culprit.
NAMED = {
    "smprun": r"smprun: ranks? (\d+)",
    "mpirun": r"process rank (\d+) with PID|Process name: \[\S+,(\d+)\]",
    "torchrun": r"\[\d+\]:\n(?:.*\n)*?  rank +: (\d+) ",
}
#: A rank's account of somebody else's end.
BLAMES = r"smp: rank (\d+) \(\S+\) failed: .*?CommError: .*?: ranks? ([\d, ]+) (?:has|have|is|did)"


@pytest.fixture(scope="module")
def table() -> Iterator[dict[tuple[str, str], list[str]]]:
    """Collects, by fault and launcher, whether the culprit was named; printed at the end."""
    cells: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    yield cells
    print("\n| fault | " + " | ".join(LAUNCHERS) + " |\n|" + " --- |" * (1 + len(LAUNCHERS)))
    for fault in FAULTS:
        counts = [collections.Counter(cells[fault, launcher]) for launcher in LAUNCHERS]
        shown = (f"{each['right']} of {each.total()}" for each in counts)
        print(f"| {fault} | {' | '.join(shown)} |")


def blamed(launcher: str, output: str) -> set[int]:
    """Returns the ranks that the last words of the job make responsible."""
    found = list(re.finditer(NAMED[launcher], output))
    if not found:
        return set()
    rank = next(int(group) for group in found[-1].groups() if group is not None)
    if launcher == "torchrun":
        rank = int(found[-1][1])
    accounts = {int(m[1]): m[2] for m in re.finditer(BLAMES, output)}
    if launcher != "smprun" and rank in accounts:
        return {int(text) for text in accounts[rank].split(",")}
    return {rank}


@pytest.mark.parametrize(
    ("fault", "launcher", "culprit", "place"),
    [
        pytest.param(
            *(fault, launcher, (num_ranks, rank), place),
            id=f"{fault}-{launcher}-{rank}of{num_ranks}-{place}",
        )
        for fault, launcher, (num_ranks, rank), place in SERIES
    ],
)
def test_the_culprit_is_named(
    fault: str,
    launcher: str,
    culprit: tuple[int, int],
    place: str,
    tmp_path: Path,
    table: dict[tuple[str, str], list[str]],
) -> None:
    num_ranks, rank = culprit
    words = [*launch_line(launcher, num_ranks), str(JOB), fault, str(rank), place]
    with (tmp_path / "out").open("w") as output_file:
        job = subprocess.Popen(
            words,
            stdout=output_file,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(tmp_path),
                "PRTE_MCA_prte_local_tmpdir_base": str(tmp_path),
            },
            start_new_session=True,
        )
    try:
        code = job.wait(150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    output = (tmp_path / "out").read_text()
    named = blamed(launcher, output)
    table[fault, launcher].append("right" if named == {rank} else "wrong")
    print(f"CELL {fault} {launcher} {num_ranks} {rank} {place}: {named}, exit code {code}")
    assert code != 0, output
    assert named == {rank}, output
    if launcher == "smprun":
        assert output.splitlines()[-1].startswith("smprun: "), output
