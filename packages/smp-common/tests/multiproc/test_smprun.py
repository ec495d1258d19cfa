"""``smprun`` with real processes. Long, since it is one list of tests."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

SMPRUN = [sys.executable, "-m", "smdistributed.modelparallel.common.launcher"]
PREAMBLE = (
    "import os, signal, subprocess, sys, time\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
)
#: Rank 0 waits for a message that never comes.
WAITS = "from mpi4py import MPI\nif rank == 0:\n    MPI.COMM_WORLD.recv(source=1)\n"
#: What a job may take from its start to the end after a failure.
LIMIT_SECONDS = 30


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.splitlines()[-1]


class Runner:
    """Runs smprun on a script; knows the processes of its job by a mark in their environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = f"SMP_TEST_MARK={directory}".encode()
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.directory / name
        path.write_text(PREAMBLE + textwrap.dedent(text))
        return str(path)

    def start(self, *words: str, stdin: int | None = None, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*SMPRUN, *words],
            cwd=self.directory,
            env={
                **os.environ,
                "SMP_TEST_MARK": str(self.directory),
                "TMPDIR": str(self.directory),
                **environ,
            },
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], limit: float = LIMIT_SECONDS) -> Done:
        out, err = process.communicate(timeout=limit)
        left = self.left()
        assert not left, f"still running: {left}"
        return Done(process.returncode, out, err)

    def __call__(self, text: str, *words: str, num_ranks: int = 2, **environ: str) -> Done:
        line = ["-n", str(num_ranks), self.script(text), *words]
        return self.finish(self.start(*line, **environ))

    def left(self) -> dict[int, str]:
        """Returns the processes of the job that are alive, smprun among them."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if entry.name.isdecimal() and alive and self.mark in _environ(entry):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def kill_all(self) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.communicate()


def _environ(entry: Path) -> list[bytes]:
    return (entry / "environ").read_bytes().split(b"\0")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.kill_all()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# How the program is run


def test_the_program_sees_what_plain_python_shows_it(run: Runner) -> None:
    text = """
    import helper
    print([sys.argv, sys.path[0], __name__, __file__, __spec__ if "__spec__" in vars() else None])
    print(sys.modules["__main__"].rank == rank, helper.value)
    """
    (run.directory / "helper.py").write_text("value = 5\n")
    script = os.path.basename(run.script(text))
    words = [script, "-n", "7", "--set", "a=b", "--", "two words"]
    plain = subprocess.run(
        [sys.executable, *words],
        cwd=run.directory,
        env={**os.environ, "OMPI_COMM_WORLD_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    done = run.finish(run.start("-n", "1", *words))
    assert (done.code, done.err) == (0, "")
    assert done.out == "".join(f"[0] {line}\n" for line in plain.stdout.splitlines())


def test_a_module_is_run_with_its_arguments(run: Runner) -> None:
    package = run.directory / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tool.py").write_text("import sys; print(__name__, __package__, sys.argv)\n")
    done = run.finish(run.start("-n", "1", "-m", "pack.tool", "--lr", "-m"))
    assert (done.code, done.err) == (0, "")
    assert done.out == f"[0] __main__ pack {[str(package / 'tool.py'), '--lr', '-m']}\n"


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_the_first_rank_reads_to_the_end_of_the_input(run: Runner, kind: str) -> None:
    script = run.script("print(rank, sys.stdin.read().split())")
    given = run.directory / "input"
    given.write_text("before first last")
    with given.open("rb", buffering=0) as file:
        file.seek(len("before "))  # as a shell has read it
        reading, writing = os.pipe()
        if kind == "pipe":
            os.write(writing, file.read())
        started = run.start("-n", "2", script, stdin=reading if kind == "pipe" else file.fileno())
        os.close(reading)
        os.close(writing)
    done = run.finish(started)
    assert "[0] 0 ['first', 'last']" in done.out
    assert "[1] 1 []" in done.out


def test_exit_handlers_still_see_the_program(run: Runner) -> None:
    done = run(
        """
    import atexit
    def report(): print(sys.modules["__main__"].rank, sys.argv[1:])
    atexit.register(report)
    """,
        "x",
        num_ranks=1,
    )
    assert done.out == "[0] 0 ['x']\n"


def test_the_configuration_reaches_every_rank(run: Runner) -> None:
    script = run.script("print(os.environ['SM_HP_MP_PARAMETERS'])")
    line = ["-n", "2", "--set", "ddp=True", "--set", "partitions=2", script]
    done = run.finish(run.start(*line, SM_HP_MP_PARAMETERS='{"microbatches": 2, "ddp": false}'))
    shown = '{"microbatches": 2, "ddp": true, "partitions": 2}'
    assert sorted(done.out.splitlines()) == [f"[0] {shown}", f"[1] {shown}"]


# Output


def test_long_lines_of_several_ranks_stay_whole(run: Runner) -> None:
    done = run("for letter in 'abc': print(f'{rank}{letter}' * 100_000)")
    expected = [f"[{rank}] {f'{rank}{c}' * 100_000}" for rank in (0, 1) for c in "abc"]
    assert sorted(done.out.splitlines()) == expected


def test_each_stream_is_kept_and_the_rest_of_a_line_is_shown(run: Runner) -> None:
    done = run("print('out'); print('err', file=sys.stderr); print('rest', end='')", num_ranks=1)
    assert (done.code, done.out, done.err) == (0, "[0] out\n[0] rest\n", "[0] err\n")


def test_a_progress_bar_moves_while_it_runs(run: Runner) -> None:
    script = run.script("""
    print("\\rstep 0", end="", flush=True)
    while not os.path.exists("seen"):
        time.sleep(0.05)
    print("\\rstep 1", flush=True)
    """)
    process = run.start("-n", "1", script)
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LIMIT_SECONDS)[0], "nothing was shown"
    assert os.read(process.stdout.fileno(), 100) == b"[0] step 0\r"
    (run.directory / "seen").touch()
    assert run.finish(process).out == "[0] step 1\n"


def test_options_of_open_mpi_4_work_for_real(run: Runner) -> None:
    toolkit = (
        "--host localhost:2 -np 2 --allow-run-as-root --display-map --tag-output "
        "-mca btl_tcp_if_include lo -mca oob_tcp_if_include lo -mca plm_rsh_no_tree_spawn 1 "
        "-bind-to none -map-by slot -mca pml ob1 -mca btl ^openib "
        "-mca orte_abort_on_non_zero_status 1 -mca btl_vader_single_copy_mechanism none "
        "-x NCCL_MIN_NRINGS=4 -x NCCL_SOCKET_IFNAME=lo -x NCCL_DEBUG -x LD_LIBRARY_PATH -x PATH "
        "-mca btl_vader_single_copy_mechanism none -x NCCL_PROTO=simple"
    )
    script = run.script("""
    from mpi4py import MPI
    print("sum", MPI.COMM_WORLD.allreduce(rank + 1), os.environ["NCCL_MIN_NRINGS"])
    big = MPI.COMM_WORLD.bcast(b"x" * 10_000_000 if rank == 0 else None)
    print("large", len(big), os.environ["OMPI_MCA_smsc"])
    """)
    done = run.finish(run.start("--mpi-args", toolkit, script))
    assert (done.code, done.err) == (0, "")
    lines = [line for line in done.out.splitlines() if line.startswith("[")]
    assert sorted(lines) == [
        *("[0] large 10000000 ^cma,xpmem,knem", "[0] sum 3 4"),
        *("[1] large 10000000 ^cma,xpmem,knem", "[1] sum 3 4"),
    ]
    assert "JOB MAP" in done.out


# Ends


def test_an_exception(run: Runner) -> None:
    done = run(WAITS + "if rank == 1:\n    time.sleep(0.5)\n    raise ValueError('boom')\n")
    assert done.code == 1
    assert re.fullmatch(
        r"smprun: rank 1 \(\S+\) failed first: ValueError: boom \(exit code 1\)", done.last
    )
    assert done.err.count("Traceback") == 1
    assert f'[1]   File "{run.directory}/train.py", line 8, in <module>' in done.err
    for hidden in ("bootstrap", "runpy", "prterun", "smp-failure"):
        assert hidden not in done.err


def test_the_first_traceback_is_repeated_last(run: Runner) -> None:
    done = run("""
    if rank == 1:
        raise ValueError("boom")
    time.sleep(0.5)
    print("still talking", file=sys.stderr)
    raise OSError("later")
    """)
    assert done.code == 1
    assert "rank 1" in done.last
    tail = done.err[done.err.rindex("Traceback") :]
    assert "ValueError: boom" in tail
    assert "OSError" not in tail


def test_copies_are_ranks_like_others(run: Runner) -> None:
    # What is imported once: a stand-in of a framework, and numpy, whose numbers must differ.
    place = run.directory / "smdistributed/modelparallel/tensorflow"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(
        "import numpy.random\nfrom os import getpid\nSERVER = getpid()\n"
    )
    (run.directory / "sitecustomize.py").write_text(  # it is found before one that is installed
        f"from smdistributed import modelparallel\n"
        f"modelparallel.__path__.insert(0, {str(place.parent)!r})\n"
    )
    script = run.script("""
    import smdistributed.modelparallel.tensorflow as smp
    import numpy, random
    from mpi4py import MPI
    drawn = MPI.COMM_WORLD.gather((numpy.random.rand(), random.random()))
    kept = open(f"held-{rank}", "w")
    kept.write("back")
    if rank == 0:
        print(smp.SERVER == os.getpid(), len(set(sum(drawn, ()))), sys.argv[1:])
    MPI.Finalize()
    sys.exit(0)
    """)
    path = os.pathsep.join([str(run.directory), os.environ.get("PYTHONPATH", "")])
    words = ("-n", "2", "--framework=tensorflow", "--fork", script, "a")
    done = run.finish(run.start(*words, PYTHONPATH=path))
    assert (done.code, done.err) == (0, "")
    assert done.out == "[0] False 4 ['a']\n"
    assert [(run.directory / f"held-{rank}").read_text() for rank in (0, 1)] == ["back"] * 2


def test_copies_are_of_this_host_and_need_what_they_copy(run: Runner) -> None:
    done = run.finish(run.start("-n", "2", "--fork", "--hosts=a:1,b:1", run.script("")))
    assert done.code == 2
    assert "--fork copies a process of this host; received 2 hosts" in done.last


def test_sys_exit(run: Runner) -> None:
    done = run(WAITS + "if rank == 1:\n    sys.exit(7)\n")
    assert done.code == 7
    assert "rank 1" in done.last
    assert done.last.endswith("failed first: sys.exit(7) (exit code 7)")


def test_sys_exit_with_a_message(run: Runner) -> None:
    done = run("sys.exit('no data')", num_ranks=1)
    assert done.code == 1
    assert "[0] no data\n" in done.err


def test_sys_exit_0_is_well(run: Runner) -> None:
    done = run("print(1)\nsys.exit(0)", num_ranks=1)
    assert (done.code, done.out, done.err) == (0, "[0] 1\n", "")


def test_an_end_without_python(run: Runner) -> None:
    done = run("if rank == 1:\n    os._exit(9)\ntime.sleep(60)")
    assert done.code == 9
    assert re.fullmatch(r"smprun: rank 1 \(\S+\) failed first: exit code 9", done.err.strip())


def test_a_killed_mpirun_leaves_no_files(run: Runner) -> None:
    # Left behind, they would keep a later mpirun with the same process id from starting.
    script = run.script("print(os.environ['PMIX_SERVER_TMPDIR'], flush=True)\ntime.sleep(60)")
    process = run.start("-n", "1", script)
    assert process.stdout is not None
    place = process.stdout.readline().removeprefix("[0] ").strip()
    assert place.startswith(f"{run.directory}/smprun-")
    assert os.path.isdir(place)
    mpirun = next(pid for pid, line in run.left().items() if line.split()[0].endswith("prterun"))
    os.kill(mpirun, signal.SIGKILL)
    run.finish(process)
    assert not list(run.directory.glob("smprun-*"))


@pytest.mark.parametrize("waits", [WAITS, "time.sleep(0 if rank else 60)\n"])
def test_a_killed_rank(run: Runner, waits: str) -> None:
    done = run(waits + "time.sleep(0.3)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.code == 137
    assert re.fullmatch(
        r"smprun: rank 1 \(\S+\) was killed by signal 9 \(SIGKILL\)", done.err.strip()
    )


def test_mpi_abort(run: Runner) -> None:
    done = run(WAITS + "MPI.COMM_WORLD.Abort(5)")
    assert done.code == 5
    assert done.last.endswith("failed first: called MPI_Abort (exit code 5)")


def test_a_failing_import(run: Runner) -> None:
    (run.directory / "broken.py").write_text("import no_such_module\n")
    done = run("if rank == 1:\n    import broken\ntime.sleep(60)")
    assert done.code == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.last
    assert f'[1]   File "{run.directory}/broken.py", line 1, in <module>' in done.err


def test_a_syntax_error(run: Runner) -> None:
    done = run("def :", num_ranks=1)
    assert done.code == 1
    assert "SyntaxError" in done.last
    assert "bootstrap" not in done.err


def test_the_blamed_rank_is_named(run: Runner) -> None:
    done = run("""
    from smdistributed.modelparallel.common.errors import CommError
    if rank == 0:
        raise CommError("recv_from(1) timed out", rank=0, missing_ranks=(1,))
    os.kill(os.getpid(), signal.SIGSTOP)
    """)
    assert done.code == 1
    assert done.last.startswith("smprun: rank 1 did not answer: ")
    assert done.last.endswith("recv_from(1) timed out (noticed by rank 0)")


def test_a_stopped_rank_does_not_outlive_another_ones_failure(run: Runner) -> None:
    started = time.monotonic()
    done = run("""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)
    raise ValueError("boom")
    """)
    assert "rank 1" in done.last
    assert time.monotonic() - started < 1 + 10 + 5


def test_a_stopped_mpirun_cannot_hold_up_the_end(run: Runner) -> None:
    done = run("""
    print("seen", file=sys.stderr)
    if rank == 1:
        subprocess.Popen(["sh", "-c", "sleep 0.3; kill -STOP $0", str(os.getppid())])
        time.sleep(0.1)
        raise ValueError("boom")
    time.sleep(60)
    """)
    assert done.code == 1
    assert "boom" in done.last


def test_timeout(run: Runner) -> None:
    script = run.script("os.kill(os.getpid(), signal.SIGSTOP)")
    job = run.start("-n", "2", "--timeout", "5", script)
    told, stopped = "", "ranks 0-1 (localhost): is stopped (SIGSTOP, or a debugger)\n"
    while told != stopped and job.poll() is None:  # its ranks are starting
        time.sleep(0.2)
        told = subprocess.run(
            [*SMPRUN, "--status", str(job.pid)], capture_output=True, text=True, check=False
        ).stdout
    assert told == stopped
    done = run.finish(job)
    assert done.code == 124
    expected = "smprun: the job did not end within 5 s and was ended (exit code 124)"
    assert done.err.strip() == expected


def test_processes_that_ranks_detach_do_not_survive(run: Runner) -> None:
    done = run("""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["sleep", "600"], start_new_session=True, **streams)
    """)
    assert done.code == 0  # and run() has looked for processes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_job(run: Runner, number: signal.Signals, code: int) -> None:
    process = run.start("-n", "2", run.script("print('ready')\ntime.sleep(60)"))
    assert process.stdout is not None
    assert process.stdout.readline().endswith("ready\n")
    process.send_signal(number)
    done = run.finish(process)
    assert done.code == code
    assert done.err.strip() == f"smprun: ended by {number.name} (exit code {code})"


SAVES = """
import signal
def save(*_):
    time.sleep(rank)
    open(f"saved{rank}", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
"""


def start_ready(run: Runner, text: str, *words: str) -> subprocess.Popen[str]:
    """Starts a job and returns when both of its ranks have printed a line."""
    process = run.start("-n", "2", *words, run.script(text))
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().endswith("ready\n")
    return process


def test_ranks_that_handle_sigterm_have_time_to_save(run: Runner) -> None:
    # Rank 0 leaves while rank 1 still saves, and so does what it started.
    child = "child = subprocess.Popen(['sleep', '2'])\n"
    process = start_ready(run, f"{SAVES}{child}print('ready')\ntime.sleep(60)")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = run.finish(process)
    assert time.monotonic() - started < 10
    assert done.code == 143
    assert done.err.strip() == "smprun: ended by SIGTERM (exit code 143)"
    assert {path.name for path in run.directory.glob("saved*")} == {"saved0", "saved1"}


def test_the_time_to_save_is_limited(run: Runner) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, print)\nprint('ready')\n"
    process = start_ready(run, f"{deaf}while True: time.sleep(1)", "--grace", "2")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = run.finish(process)
    assert 2 < time.monotonic() - started < 10
    assert done.code == 143
    assert "smp-ending" not in done.err


def test_a_programs_own_signals_reach_its_ranks(run: Runner) -> None:
    text = """
    import signal
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    print("ready")
    while not heard:
        time.sleep(0.1)
    time.sleep(0.5)  # mpirun may send it twice
    """
    process = start_ready(run, textwrap.dedent(text))
    process.send_signal(signal.SIGUSR1)
    done = run.finish(process)
    assert (done.code, done.err) == (0, "")


def test_a_second_signal_kills_at_once(run: Runner) -> None:
    process = run.start("-n", "1", run.script("print('ready')\ntime.sleep(60)"))
    assert process.stdout is not None
    assert process.stdout.readline().endswith("ready\n")
    mpirun = next(pid for pid, line in run.left().items() if line.split()[0].endswith("prterun"))
    os.kill(mpirun, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert run.finish(process).code == 130
    assert time.monotonic() - started < 2


def test_the_job_ends_with_smprun_itself(run: Runner) -> None:
    process = run.start("-n", "2", run.script("print('ready')\ntime.sleep(60)"))
    assert process.stdout is not None
    assert process.stdout.readline().endswith("ready\n")
    process.kill()
    wait_for(lambda: not run.left())


def test_a_reader_that_leaves_ends_the_job(run: Runner) -> None:
    script = run.script("while True:\n    print('more')")
    process = run.start("-n", "2", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(LIMIT_SECONDS)
    wait_for(lambda: not run.left())
    assert process.returncode == 141


def test_mpiruns_own_messages_are_shown(run: Runner) -> None:
    done = run.finish(run.start("-n", "1", "--mpi-args", "--no-such-option", run.script("")))
    assert done.code != 0
    assert "--no-such-option" in done.err
    assert done.last.startswith("smprun: mpirun ended with exit code")


# Starting again


def test_a_lost_rank_has_the_job_start_again_so_often(run: Runner) -> None:
    script = run.script("""
    print(os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
    time.sleep(0.3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """)
    done = run.finish(run.start("-n", "2", "--restarts", "1", script))
    assert done.code == 137
    assert sorted(done.out.splitlines()) == ["[0] 0 1", "[0] 1 1", "[1] 0 1", "[1] 1 1"]
    killed = r"smprun: rank 1 \(\S+\) was killed by signal 9 \(SIGKILL\)"
    restart = "smprun: restart 1 of 1 in 2 s"
    assert re.fullmatch(rf"{killed}\n{restart}\n{killed}; no restart is left of 1\n", done.err)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("time.sleep(rank / 2)\nraise ValueError('boom')", [], "each rank failed by itself"),
        ("", ["--mpi-args", "--no-such-option"], "mpirun has refused it"),
    ],
)
def test_what_would_fail_again_is_not_started_again(
    run: Runner, text: str, options: list[str], reason: str
) -> None:
    done = run.finish(run.start("-n", "2", "--restarts", "5", *options, run.script(text)))
    assert done.code
    assert done.last.endswith(f"; not started again: {reason}")
    assert "restart 1" not in done.err


def test_a_signal_before_the_next_start_ends_the_job(run: Runner) -> None:
    process = run.start("-n", "1", "--restarts", "5", run.script("os._exit(9)"))
    assert process.stderr is not None
    assert any("restart 1 of 5" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    done = run.finish(process)
    assert (done.code, done.err) == (130, "smprun: ended by SIGINT (exit code 130)\n")
