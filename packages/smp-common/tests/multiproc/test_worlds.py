"""The pool of worlds: what a world keeps, what poisons it, and that nothing is left behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import CommError, SMPError
from smdistributed.modelparallel.common.launcher import bootstrap
from smdistributed.modelparallel.common.testing import (
    Launcher,
    RanksFailedError,
    World,
    Worlds,
    cases_of,
    run_ranks,
)

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

NOTES: list[str] = []
FORKED = World(2, launcher="fork")


@pytest.fixture(autouse=True)
def copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked for that copies of a process do not have."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def pool() -> Iterator[Worlds]:
    pool = Worlds(most_ranks=4)
    yield pool
    pool.close()


def note(word: str) -> Callable[..., None]:
    NOTES.append(word)
    return lambda word="next": NOTES.append(word)


def notes() -> list[str]:
    return NOTES


def pid() -> int:
    return os.getpid()


def echo(*args: object) -> tuple[int, tuple[object, ...]]:
    return bootstrap.rank(), args


def fail_on(rank: int) -> None:
    if bootstrap.rank() == rank:
        raise ValueError("boom")
    time.sleep(60)


def fail_because_of_the_other() -> None:
    if bootstrap.rank() == 0:
        raise CommError("rank 1 did not answer", rank=0, missing_ranks=(1,))
    time.sleep(0.3)
    raise ValueError("the cause")


def fail_as_pytest_does() -> None:
    pytest.fail("not so")


def end(rank: int, code: int) -> None:
    if bootstrap.rank() == rank:
        os._exit(code) if code else os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleep_unless(rank: int) -> None:
    if bootstrap.rank() != rank:
        time.sleep(60)


def unpicklable() -> object:
    return lambda: None


def end_badly_later() -> Callable[[], None]:
    import atexit

    atexit.register(os._exit, 3)
    return lambda: None


def is_gone(process: int, within_seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        try:
            words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if words[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("launcher", ["smprun", "mpirun", "fork"])
def test_bodies_run_in_order_in_the_same_processes(pool: Worlds, launcher: Launcher) -> None:
    world = World(2, note, ("start",), launcher)
    before = pool.run(world, pid)
    assert [pool.run(world, echo, number, "x") for number in range(3)] == [
        ((0, (number, "x")), (1, (number, "x"))) for number in range(3)
    ]
    assert pool.run(world, notes) == (["start", *["next"] * 5],) * 2
    changed = World(2, note, ("start",), launcher, settings=("changed",))
    assert pool.run(changed, notes) == (["start", *["next"] * 5, "changed"],) * 2
    assert pool.run(World(2, note, ("start",), launcher), pid) == before
    assert pool.run(World(2, note, ("other",), launcher), pid) != before


def test_big_results_and_arguments(pool: Worlds) -> None:
    big = bytes(50_000_000)
    assert pool.run(FORKED, echo, big) == ((0, (big,)), (1, (big,)))


FAILURES = [
    (fail_on, (1,), ["rank 1", "in fail_on", "ValueError: boom"]),
    (fail_because_of_the_other, (), ["rank 1", "ValueError: the cause"]),
    (fail_as_pytest_does, (), ["not so"]),
    (unpicklable, (), ["pickle"]),
    (end, (1, 5), ["rank 1", "5"]),
    (end, (1, 0), ["rank 1", "signal 9"]),
    (sleep_unless, (0,), ["no end within 3 s on ranks [1]", "in sleep_unless"]),
]


@pytest.mark.parametrize(
    ("launcher", "body", "args", "words"),
    [
        *(("fork", *each) for each in FAILURES),
        *(("smprun", *FAILURES[number]) for number in (0, 5)),
        *(pytest.param("smprun", *FAILURES[number], marks=pytest.mark.slow) for number in (4, 6)),
        # What ends a process ends what stands in for it, and the other way round.
        *(("smprun-fork", *FAILURES[number]) for number in (5, 6)),
    ],
)
def test_a_failure_is_shown_and_poisons_its_world_alone(
    launcher: Launcher, body: Callable[..., None], args: tuple[int, ...], words: list[str]
) -> None:
    pool = Worlds(most_ranks=4)
    world, other = World(2, launcher=launcher), World(1, launcher="python")
    before, others = pool.run(world, pid), pool.run(other, pid)
    with pytest.raises(RanksFailedError) as raised:
        pool.run(world, body, *args, timeout=3)
    for word in words:
        assert word in str(raised.value)
    assert all(is_gone(process) for process in before)
    after = pool.run(world, pid)
    assert not set(after) & set(before)
    assert pool.run(other, pid) == others
    pool.close()
    assert all(is_gone(process) for process in (*after, *others))


def test_a_setup_that_fails_is_shown(pool: Worlds) -> None:
    with pytest.raises(RanksFailedError, match=r"rank 1(?s:.*)in fail_on"):
        pool.run(World(2, fail_on, (1,), "fork"), pid)


def test_the_world_used_longest_ago_makes_room(pool: Worlds) -> None:
    first, second, third = (World(2, note, (word,), "fork") for word in "abc")
    one, two = pool.run(first, pid), pool.run(second, pid)
    pool.run(first, notes)
    pool.run(third, pid)
    assert all(is_gone(process) for process in two)
    assert pool.run(first, pid) == one


def value_of(module: str) -> int:
    found: int = importlib.import_module(module).VALUE
    return found


def test_a_search_path_wins_over_what_was_imported_before(
    pool: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {value: tmp_path / str(value) for value in (1, 2)}
    for value, place in places.items():
        place.mkdir()
        place.joinpath("of_two_minds.py").write_text(f"VALUE = {value}")
    monkeypatch.syspath_prepend(places[1])
    preload = ("of_two_minds",)
    plain = World(2, launcher="fork", preload=preload)
    changed = World(2, launcher="fork", env={"PYTHONPATH": str(places[2])}, preload=preload)
    assert pool.run(plain, value_of, "of_two_minds") == (1, 1)
    assert pool.run(changed, value_of, "of_two_minds") == (2, 2)


def test_what_copies_would_do_each_is_done_once(
    pool: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "VALUE = os.getpid(), gc.get_freeze_count()"
    code = f"import gc, os\ndef prepare():\n    global VALUE\n    {value}"
    tmp_path.joinpath("prepared_once.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    world = World(2, launcher="fork", preload=("prepared_once",))
    one, other = pool.run(world, value_of, "prepared_once")
    assert one == other
    assert one[0] not in pool.run(world, pid)
    assert one[1] > 0


def test_what_starts_threads_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    tmp_path.joinpath("busy_from_the_start.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SMPError, match="importing busy_from_the_start started threads"):
        run_ranks(1, pid, launcher="fork", timeout=30, preload=["busy_from_the_start"])


def test_a_world_that_ends_badly_is_reported() -> None:
    pool = Worlds()
    pool.run(World(2, end_badly_later, (), "fork"), pid)
    with pytest.raises(RanksFailedError, match="ended with code 3"):
        pool.close()


def test_a_body_must_be_found_again(pool: Worlds) -> None:
    with pytest.raises(ValueError, match="top level"):
        pool.run(FORKED, lambda: None)


OWNER = """
import os, sys, time
from smdistributed.modelparallel.common.testing import World, Worlds
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_worlds import pid, sleep_unless
pool = Worlds()
world = World(2, launcher=sys.argv[2])
print(*pool.run(world, pid), flush=True)
pool.run(world, sleep_unless, 0, timeout=60)
"""


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        *(
            (each, number)
            for each in ("smprun", "fork")
            for number in (signal.SIGKILL, signal.SIGINT)
        ),
        ("smprun-fork", signal.SIGKILL),
    ],
)
def test_nothing_outlives_the_owner(launcher: str, number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, __file__, launcher],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    assert all(is_gone(process) for process in pids)


def test_cases_are_found_by_their_names() -> None:
    names = {"case_one": pid, "case_two": echo, "case_three": 3, "other": pid}
    assert cases_of(names) == {"one": pid, "two": echo}
