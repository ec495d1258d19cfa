"""Jobs on hosts that ssh reaches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.testing.two_hosts import NoHostsError, two_hosts
from smdistributed.modelparallel.launch.job import nodes

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

TRAINS = """
import os, pathlib, signal, socket, time
from mpi4py import MPI
world = MPI.COMM_WORLD
own = (socket.gethostname(), os.environ["SM_CURRENT_HOST"], os.environ["TRAINING_JOB_NAME"],
       os.environ["WORD"], len(os.listdir(os.environ["SM_CHANNEL_TRAIN"])))
print("rank", world.rank, *own, flush=True)
pathlib.Path(os.environ["SM_MODEL_DIR"], f"rank{world.rank}").touch()
print("hosts", os.environ["SM_HOSTS"], flush=True)
world.barrier()
if world.rank == 1:  # the host of this rank is lost
    pathlib.Path(os.environ["DOWN"]).touch()
    time.sleep(0.5)  # mpirun hands on what was printed
    os.kill(os.getppid(), signal.SIGKILL)
world.barrier()
"""
PROGRAM = """
import sys
from smdistributed.modelparallel.launch.pytorch import PyTorch

options, down = sys.argv[1:]
estimator = PyTorch(
    "train.py",
    source_dir="code",
    instance_count=2,
    instance_type="local",
    environment={"WORD": "a b", "DOWN": down},
    use_spot_instances=True,
    distribution={
        "mpi": {"enabled": True, "processes_per_host": 1, "custom_mpi_options": options}
    },
)
estimator.fit({"train": "data"}, job_name="over-ssh")
print("DONE", estimator.model_data)
"""


def test_a_job_runs_on_the_hosts_of_a_file_and_goes_on_with_those_that_are_left(
    tmp_path: Path,
) -> None:
    for name in ("code", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/a.txt").touch()
    (tmp_path / "code/train.py").write_text(TRAINS)
    (tmp_path / "program.py").write_text(PROGRAM)
    try:
        with two_hosts(tmp_path) as hosts:
            file = tmp_path / "hosts.txt"
            file.write_text("".join(f"{address} slots=4\n" for address in hosts.addresses))
            variables = {nodes.HOSTFILE_VARIABLE: str(file), "SMP_JOBS": str(tmp_path / "jobs")}
            command = [sys.executable, "program.py", hosts.mpi_options, str(hosts.down)]
            done = hosts.run(command, tmp_path, 100, **variables)
    except NoHostsError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rank 1 {hosts.names[1]} algo-2 over-ssh a b 1" in done.stdout
    assert " algo-1 over-ssh a b 1" in done.stdout
    assert f"restart 1 of 30: host {hosts.addresses[1]} is gone; 1 of 2 processes" in done.stdout
    shown = [line.partition("hosts ")[2] for line in done.stdout.splitlines() if "hosts [" in line]
    assert shown == ['["algo-1","algo-2"]', '["algo-1","algo-2"]', '["algo-1"]']
    assert {path.name for path in (tmp_path / "jobs/over-ssh/model").iterdir()} == {
        "rank0",
        "rank1",
    }


@pytest.mark.parametrize(
    ("text", "given", "told"),
    [
        ("a\n", {}, "has 1 of 2: add some, or lower instance_count"),
        (None, {}, "must name a file of hosts; .* No such file"),
        ("a\nb\n", {"has_mpi": False}, "reached by mpirun alone"),
        ("a\nb\n", {"has_pipes": True}, "got input_mode 'Pipe'"),
    ],
)
def test_what_ssh_does_not_reach_is_refused_at_once(
    tmp_path: Path, text: str | None, given: dict[str, bool], told: str
) -> None:
    file = tmp_path / "hosts.txt"
    if text is not None:
        file.write_text(text)
    environ = {nodes.HOSTFILE_VARIABLE: str(file)}
    with pytest.raises(SMPError, match=told):
        nodes.check(2, environ, **{"has_mpi": True, "has_pipes": False, **given})
    nodes.check(1, environ, has_mpi=False, has_pipes=False)  # alone it runs here
