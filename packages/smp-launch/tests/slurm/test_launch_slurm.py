"""Jobs of estimators under a real Slurm: queued, run over its nodes, stopped, requeued."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from job_bench import processes_of
from slurm_cluster import cluster, run, state_of, wait_until

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import LaunchError, UnexpectedStatusException
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import Session

__all__ = ["cluster"]

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("cluster"),
]

#: Losses whose last digits depend on which rank computed what.
TRAINS = """
import math, os
from mpi4py import MPI
world = MPI.COMM_WORLD
weight = 1.0
for step in range(5):
    share = math.sin(weight * (world.rank + 1)) / (world.rank + 3)
    weight -= 0.1 * world.allreduce(share)
    if world.rank == 0:
        print(f"loss: {weight!r}")
where = world.gather((os.environ.get("SLURMD_NODENAME"), os.environ["SM_CURRENT_HOST"]))
if world.rank == 0:
    print("where", where)
"""
SAVES = """
import os, pathlib, signal, sys, time
from mpi4py import MPI
rank, place = MPI.COMM_WORLD.rank, pathlib.Path(os.environ["SM_MODEL_DIR"])
def save(*_):
    (place / f"saved{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(place / f"ready{rank}").touch()
time.sleep(100)
"""


def make(
    tmp_path: Path, script: str, *, backend: str = "slurm", ranks: int = 0, **given: Any
) -> Any:
    (tmp_path / "train.py").write_text(script)
    if ranks:
        given["distribution"] = {"mpi": {"enabled": True, "processes_per_host": ranks}}
    session = Session(root=tmp_path / "jobs", backend=backend)
    return PyTorch(str(tmp_path / "train.py"), sagemaker_session=session, **given)


def folder_of(estimator: Any) -> JobFolder:
    found: JobFolder = estimator.sagemaker_session.job(estimator.latest_training_job.name)
    return found


def log_of(estimator: Any, host: str = "algo-1") -> str:
    path = folder_of(estimator).logs / f"{host}.log"
    return path.read_text() if path.exists() else ""


def number_of(estimator: Any) -> str:
    return (folder_of(estimator).path / "slurm-job").read_text()


def status_of(estimator: Any) -> tuple[str, str]:
    found = estimator.latest_training_job.describe()
    return found["TrainingJobStatus"], found["SecondaryStatus"]


def test_a_job_of_two_nodes_has_the_losses_of_this_machine(tmp_path: Path) -> None:
    logs = []
    for backend in ("local", "slurm"):
        estimator = make(tmp_path, TRAINS, backend=backend, ranks=2, instance_count=2)
        estimator.fit(logs=False)
        logs.append(log_of(estimator))
    here, there = (re.findall(r"loss: \S+", log) for log in logs)
    assert here == there
    assert len(here) == 5
    hosts = [("n1", "algo-1"), ("n1", "algo-1"), ("n2", "algo-2"), ("n2", "algo-2")]
    assert f"where {hosts}" in logs[1]
    wait_until(lambda: state_of(number_of(estimator)) == "COMPLETED", "Slurm sees no end")


def test_a_script_runs_once_on_each_node(tmp_path: Path) -> None:
    script = "import os; print(os.environ['SLURMD_NODENAME'], os.environ['SM_CURRENT_HOST'])"
    estimator = make(tmp_path, script, instance_count=2)
    estimator.fit(logs=False)
    assert log_of(estimator) == "n1 algo-1\n"
    assert log_of(estimator, "algo-2") == "n2 algo-2\n"


def test_a_failure_on_another_node_is_named(tmp_path: Path) -> None:
    script = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("planted failure")
MPI.COMM_WORLD.barrier()
"""
    estimator = make(tmp_path, script, ranks=1, instance_count=2)
    with pytest.raises(UnexpectedStatusException, match=r"rank 1 .*ValueError: planted failure"):
        estimator.fit(logs=False)


def test_ranks_of_all_nodes_save_when_a_job_is_stopped(tmp_path: Path) -> None:
    estimator = make(tmp_path, SAVES, ranks=1, instance_count=2)
    estimator.fit(wait=False)
    model = folder_of(estimator).model
    wait_until(lambda: len(list(model.glob("ready*"))) == 2, "the ranks do not start")
    estimator.latest_training_job.stop()
    estimator.latest_training_job.wait(logs=False)
    assert status_of(estimator) == ("Stopped", "Stopped")
    assert {path.name for path in model.glob("saved*")} == {"saved0", "saved1"}


def test_a_job_is_ended_after_its_time(tmp_path: Path) -> None:
    estimator = make(tmp_path, SAVES, ranks=1, max_run=1)
    estimator.fit(logs=False)
    assert status_of(estimator) == ("Stopped", "MaxRuntimeExceeded")
    assert (folder_of(estimator).model / "saved0").exists() or not (
        folder_of(estimator).model / "ready0"
    ).exists()


def test_a_queued_job_is_pending_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_SLURM_OPTIONS", '{"*": "--begin=now+1hour --comment=later"}')
    estimator = make(tmp_path, "print(1)")
    estimator.fit(wait=False)
    assert status_of(estimator) == ("InProgress", "Pending")
    estimator.latest_training_job.stop()
    estimator.latest_training_job.wait()
    assert status_of(estimator) == ("Stopped", "Stopped")
    assert state_of(number_of(estimator)) == "CANCELLED"


def test_a_requeued_job_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[2], "step")
step = int(place.read_text()) if place.exists() else 0
print("from", step)
while step < 3:
    step += 1
    place.write_text(str(step))
    print("step", step, flush=True)
    if step == 2 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        time.sleep(100)
"""
    given = {"hyperparameters": {"to": "/opt/ml/checkpoints"}, "checkpoint_s3_uri": "s3://b/kept"}
    estimator = make(tmp_path, script, use_spot_instances=True, **given)
    estimator.fit(wait=False)
    wait_until(lambda: "step 2" in log_of(estimator), "the script does not start")
    run("scontrol", "requeue", number_of(estimator))
    wait_until(lambda: state_of(number_of(estimator)) == "PENDING", "the job is not requeued")
    # Slurm waits for two minutes before it starts a requeued job: in the second in which it ended
    # the first run, its credential is not valid.
    assert status_of(estimator)[0] == "InProgress"
    run("scontrol", "update", f"JobId={number_of(estimator)}", "StartTime=now+2")
    estimator.latest_training_job.wait(logs=False)
    assert status_of(estimator) == ("Completed", "Completed")
    assert re.findall(r"from \d|step \d", log_of(estimator)) == [
        *("from 0", "step 1", "step 2"),
        *("from 2", "step 3"),
    ]


def test_a_supervisor_that_is_killed_is_a_failed_job(tmp_path: Path) -> None:
    estimator = make(tmp_path, SAVES, ranks=1)
    estimator.fit(wait=False)
    model = folder_of(estimator).model
    wait_until(lambda: (model / "ready0").exists(), "the script does not start")
    (pid,) = (
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and is_supervisor(entry, folder_of(estimator))
    )
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnexpectedStatusException, match=r"job \d+ of Slurm has ended \(FAILED\)"):
        estimator.latest_training_job.wait(logs=False)


def is_supervisor(entry: Path, folder: JobFolder) -> bool:
    try:
        words = (entry / "cmdline").read_text().split("\0")
    except OSError:
        return False
    return str(folder.path) in words and any("job.supervisor" in word for word in words)


def test_what_slurm_refuses_leaves_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_SLURM_OPTIONS", '{"local": "--partition=nowhere"}')
    with pytest.raises(LaunchError, match=r"sbatch of Slurm: .*invalid partition"):
        make(tmp_path, "print(1)").fit()
    monkeypatch.delenv("SMP_SLURM_OPTIONS")
    with pytest.raises(LaunchError, match=r"not have the GPUs of ml.p3.2xlarge; .*--gres=none"):
        make(tmp_path, "print(1)", instance_type="ml.p3.2xlarge").fit()
    monkeypatch.setenv("SMP_SLURM_OPTIONS", "--partition=main")
    with pytest.raises(ConfigError, match="must be a JSON object of types of hosts"):
        make(tmp_path, "print(1)").fit()
    assert not [path for path in (tmp_path / "jobs").iterdir() if path.name != "s3"]
    with pytest.raises(ConfigError, match="must be one of local, slurm; got 'slrum'"):
        Session(root=tmp_path, backend="slrum")


def test_a_lost_node_is_a_failed_job_and_nothing_is_left(tmp_path: Path) -> None:
    estimator = make(tmp_path, SAVES, ranks=1, instance_count=2)
    estimator.fit(wait=False)
    job = folder_of(estimator)
    wait_until(lambda: len(list(job.model.glob("ready*"))) == 2, "the ranks do not start")
    try:
        run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
        with pytest.raises(UnexpectedStatusException, match=r"NODE_FAIL|node"):
            estimator.latest_training_job.wait(logs=False)
        wait_until(lambda: not processes_of(job.path), "processes are left")
    finally:
        # Its daemon lives, and so it is taken back as soon as it has ended what ran there.
        wait_until(lambda: run("sinfo", "-h", "-o", "%D", "-t", "idle").strip() == "2", "no n2")


RESUMES = """
import os, sys, time, torch
import smdistributed.modelparallel.torch as smp
place = sys.argv[sys.argv.index("--to") + 1]
smp.init()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
inputs = torch.linspace(-1, 1, 64).reshape(8, 8)

@smp.step
def train_step(model, inputs):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    model.backward(loss)
    return loss

first = 0
if os.path.exists(os.path.join(place, "newest")):
    first = smp.resume_from_checkpoint(place)["step"]
for step in range(first, 10):
    optimizer.zero_grad()
    loss = train_step(model, inputs).reduce_mean()
    optimizer.step()
    if smp.rank() == 0:
        print(f"step {step} loss: {loss.item()!r}", flush=True)
    kept = {"model": model, "optimizer": optimizer, "user_content": {"step": step + 1}}
    smp.save_checkpoint(place, step, **kept)
    is_here = smp.rank() == 0 and step == 5 and "SLURM_JOB_ID" in os.environ
    if is_here and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        print("waits", flush=True)
        time.sleep(100)
"""


def test_a_preempted_job_of_the_library_resumes_to_equal_losses(tmp_path: Path) -> None:
    parameters = {"partitions": 2, "microbatches": 4}
    given = {
        "hyperparameters": {"to": "/opt/ml/checkpoints"},
        "distribution": {
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
            "mpi": {"enabled": True, "processes_per_host": 1},
        },
        "instance_count": 2,
    }
    whole = make(tmp_path, RESUMES, backend="local", checkpoint_s3_uri="s3://b/whole", **given)
    whole.fit(logs=False)
    cut = make(tmp_path, RESUMES, use_spot_instances=True, checkpoint_s3_uri="s3://b/cut", **given)
    cut.fit(wait=False)
    wait_until(lambda: "waits" in log_of(cut), "the script does not come so far")
    run("scontrol", "requeue", number_of(cut))
    wait_until(lambda: state_of(number_of(cut)) == "PENDING", "the job is not requeued")
    run("scontrol", "update", f"JobId={number_of(cut)}", "StartTime=now+2")
    cut.latest_training_job.wait(logs=False)
    assert status_of(cut) == ("Completed", "Completed")
    here, there = (re.findall(r"step \d+ loss: \S+", log_of(each)) for each in (whole, cut))
    assert len(here) == 10
    assert there == here, "no step is missing, and none runs twice"
