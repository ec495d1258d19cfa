"""The failure matrix: whatever ends one rank ends the job, soon, with a cause on the screen.

Most cells are marked slow; in the others each failure, each place and each size of job is met.
These have ranks that are copies of one process, which smprun sees like others; all cells have real
ones too.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from tf_worlds import PRELOAD, QUIET, launcher_of

from smdistributed.modelparallel.common.comm.transport import FAREWELL_SECONDS
from smdistributed.modelparallel.common.testing import Launcher, RanksFailedError, run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(150)]

BODY = Path(__file__).parent / "failing_job.py"
HANG_SECONDS = 6
#: So long that a test that needs it to end fails.
NEVER_SECONDS = 100
BOUND_SECONDS = 10
CAUSES = {
    "kill": "signal 9",
    "stop": "did not answer",
    "exception": "planted failure",
    "exit": "sys.exit(3)",
    "leave": "has ended",
}
#: What passes until others may know, besides what each failure takes.
DELAYS = {"stop": HANG_SECONDS, "leave": 2 * FAREWELL_SECONDS}


class Cell(NamedTuple):
    """Who fails where; see the body for the places."""

    failure: str
    place: str
    num_ranks: int = 2
    culprit: int = 1


#: What ends a process by itself may do so anywhere.
PLACES = {
    "kill": ("between", "executing"),
    "stop": ("between", "executing"),
    "exception": ("between", "executing", "building", "tracing"),
    "exit": ("between", "executing", "building", "tracing"),
    "leave": ("between", "built"),
}
#: Who fails in jobs of four.
CULPRITS = {"between": 2, "executing": 2, "building": 0, "tracing": 3, "built": 1}
MATRIX = [
    cell
    for failure, places in PLACES.items()
    for place in places
    for cell in (Cell(failure, place), Cell(failure, place, 4, CULPRITS[place]))
]
#: Exceptions twice: inside an operation TensorFlow makes an error of its own of them.
FEW = {
    Cell("kill", "executing", 4, 2),
    Cell("stop", "between"),
    Cell("exception", "tracing"),
    Cell("exit", "building"),
    Cell("leave", "built"),
}
#: After what others wait for seconds.
SILENT = {cell for cell in FEW if cell.failure in ("stop", "leave")}


def test_the_few_have_each_failure_place_and_size() -> None:
    assert set(MATRIX) >= FEW
    for kind in range(3):
        assert {cell[kind] for cell in FEW} == {cell[kind] for cell in MATRIX}


def name_of(cell: Cell) -> str:
    return "-".join(map(str, cell))


@pytest.mark.slow
@pytest.mark.parametrize("cell", MATRIX, ids=name_of)
def test_all_other_ranks_end(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path, "smprun")


@pytest.mark.parametrize("cell", sorted(FEW - SILENT), ids=name_of)
def test_all_other_copies_end(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path, launcher_of(cell.num_ranks))


def test_all_other_copies_end_when_one_says_nothing(tmp_path: Path) -> None:
    # Most of the time they wait, and so at the same time.
    with ThreadPoolExecutor() as pool:
        jobs = []
        for cell in sorted(SILENT):
            folder = tmp_path / cell.failure
            folder.mkdir()
            jobs.append(pool.submit(check, cell, folder, launcher_of(cell.num_ranks)))
        for job in jobs:
            job.result()


def check(cell: Cell, folder: Path, launcher: Launcher) -> None:
    """Asserts that a job ends soon, and blames the rank that failed."""
    timeout = HANG_SECONDS if cell.failure == "stop" else NEVER_SECONDS
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(
            cell.num_ranks,
            BODY,
            launcher=launcher,
            timeout=90,
            env=QUIET,
            args=[cell.failure, cell.place, cell.culprit, timeout, folder],
            preload=PRELOAD,
        )
    ended = time.time()
    message = str(raised.value)
    assert (folder / "event").exists(), message
    seconds = ended - float((folder / "event").read_text())
    print(f"{cell}: {seconds:.1f} s")
    assert seconds < BOUND_SECONDS + DELAYS.get(cell.failure, 0), message
    last = raised.value.outcome.stderr.splitlines()[-1]
    assert last.startswith(f"smprun: rank {cell.culprit} "), message
    # Where an operation fails TensorFlow may give the error of a transfer that it cancelled for it.
    is_lost = cell.failure in ("exception", "exit") and "that it cancelled for that" in last
    words = raised.value.outcome.stderr if is_lost else last
    # TensorFlow makes an error of a ``sys.exit`` in an operation, also without the library.
    is_error = cell.failure == "exit" and cell.place == "executing"
    assert ("SystemExit: 3" if is_error else CAUSES[cell.failure]) in words, message
    if cell.failure == "exit":
        assert raised.value.outcome.exit_code == (1 if is_error else 3)


@pytest.mark.slow
def test_a_job_that_catches_a_failed_transfer_goes_on_to_its_end(tmp_path: Path) -> None:
    # The leader of TensorFlow's collectives answers when the others have given up, and ended.
    run_ranks(3, BODY, timeout=120, env=QUIET, args=["late", "between", 0, HANG_SECONDS, tmp_path])
