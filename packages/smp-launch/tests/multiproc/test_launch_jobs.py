"""Jobs from ``fit`` to their end, in real processes: supervisors, scripts, ranks of MPI."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_bench import LIMIT_SECONDS, folder_of, log_of, make, names_in, processes_of, wait_until

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.processes import descendants
from smdistributed.modelparallel.launch import cli
from smdistributed.modelparallel.launch.backends.local import LocalBackend
from smdistributed.modelparallel.launch.exceptions import (
    LaunchError,
    StorageError,
    UnexpectedStatusException,
)
from smdistributed.modelparallel.launch.job import literal_paths
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.tensorflow import TensorFlow

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

SHOWS = """
import json, os, pathlib, sys
host = os.environ["SM_CURRENT_HOST"]
print("host", host, "loss: 0.5", flush=True)
print("to stderr", file=sys.stderr)
channels = os.listdir(os.environ["SM_CHANNEL_TRAIN"])
seen = {"argv": sys.argv, "cwd": os.getcwd(), "channels": channels}
pathlib.Path(os.environ["SM_MODEL_DIR"], host).write_text(json.dumps(seen))
pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], f"{host}.txt").touch()
import lib
"""
#: Says that it is there, and saves when it is asked to end.
SAVES = """
import os, pathlib, signal, sys, time
RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
place = pathlib.Path(os.environ["SM_MODEL_DIR"])
def save(*_):
    (place / f"saved{RANK}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(place / f"ready{RANK}").touch()
print("ready", flush=True)
time.sleep(100)
"""
DEAF = SAVES.replace("signal.SIGTERM, save", "signal.SIGTERM, signal.SIG_IGN")
FAILS = """
raise ValueError("planted failure")
"""
HOSTS = """
import os
from mpi4py import MPI
from smdistributed.modelparallel.common.comm.mpi import MPITransport
transport = MPITransport()
own = (os.environ["SM_CURRENT_HOST"], transport.local_rank, transport.local_size)
all_own = MPI.COMM_WORLD.gather(own)
if MPI.COMM_WORLD.rank == 0:
    print("hosts", *[word for own in all_own for word in own], os.environ["SM_HP_MP_PARAMETERS"])
    print("one machine", transport.is_one_machine)
transport.close(lambda: None)
"""


def started(session: Session, script: str, *, ranks: int = 0, **given: Any) -> PyTorch:
    """Starts a job that says ``ready`` by files, on each rank."""
    estimator = make(session, script, ranks=ranks, **given)
    estimator.fit(wait=False)
    model = folder_of(estimator).model
    wait_until(
        lambda: len(list(model.glob("ready*"))) == max(1, ranks), "the script does not start"
    )
    return estimator


def ended(estimator: PyTorch) -> dict[str, Any]:
    """Waits for the end of the job; returns how it ended."""
    assert estimator.latest_training_job is not None
    estimator.latest_training_job.wait(logs=False)
    return estimator.latest_training_job.describe()


def test_a_job_from_fit_to_its_results(
    session: Session, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").touch()
    (tmp_path / "lib.py").touch()
    estimator = make(
        session,
        SHOWS,
        instance_count=2,
        dependencies=[str(tmp_path / "lib.py")],
        hyperparameters={"lr": 0.1},
        metric_definitions=[{"Name": "loss", "Regex": "loss: ([0-9.]+)"}],
        output_path=str(tmp_path / "out"),
    )
    estimator.fit({"train": str(tmp_path / "data")}, job_name="job-1")
    shown = capfd.readouterr().out
    phases = [line[9:].partition(":")[0] for line in shown.splitlines() if line[2:3] == ":"]
    assert phases == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert "algo-1 host algo-1 loss: 0.5" in shown
    assert "algo-2 to stderr" in shown

    assert estimator.model_data == f"{tmp_path}/out/job-1/output/model.tar.gz"
    assert names_in(estimator.model_data) == ["algo-1", "algo-2"]
    assert names_in(f"{tmp_path}/out/job-1/output/output.tar.gz") == ["algo-1.txt", "algo-2.txt"]
    job = session.job("job-1")
    seen = json.loads((job.model / "algo-1").read_text())
    assert seen == {
        "argv": ["train.py", "--lr", "0.1"],
        "cwd": str(job.code),
        "channels": ["a.txt"],
    }
    assert (job.output / "success").exists()
    description = session.describe_training_job("job-1")
    assert description["TrainingJobStatus"] == "Completed"
    (metric,) = description["FinalMetricDataList"]
    assert (metric["MetricName"], metric["Value"]) == ("loss", 0.5)
    with pytest.raises(ConfigError, match="there is a job job-1"):
        estimator.fit({"train": str(tmp_path / "data")}, job_name="job-1")


def test_ranks_of_simulated_hosts_know_theirs(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    estimator = make(
        session,
        HOSTS,
        instance_count=2,
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}},
            "mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-x A=1"},
        },
    )
    estimator.fit()
    shown = capfd.readouterr().out
    hosts = "algo-1 0 2 algo-1 1 2 algo-2 0 2 algo-2 1 2"
    assert f'[0] hosts {hosts} {{"partitions": 2}}' in shown
    assert "[0] one machine True" in shown
    with pytest.raises(LaunchError, match=r"a model is what the script writes into SM_MODEL_DIR"):
        print(estimator.model_data)
    again = PyTorch.attach(folder_of(estimator).name, session)
    assert again.hyperparameters() == estimator.hyperparameters()
    assert again.instance_count == 2
    with pytest.raises(ConfigError, match=r"TensorFlow\.attach takes jobs of TensorFlow"):
        TensorFlow.attach(folder_of(estimator).name, session)


def test_an_error_of_all_ranks_is_told_once(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    estimator = make(session, FAILS, ranks=2)
    with pytest.raises(UnexpectedStatusException) as error:
        estimator.fit()
    assert error.value.actual_status == "Failed"
    verdict = r"rank [01] \(\S+\) failed first: ValueError: planted failure \(exit code 1\)"
    assert re.search(f"AlgorithmError: {verdict}$", str(error.value))
    shown = capfd.readouterr().out
    assert shown.count("Traceback") == shown.count("failed first") == 1
    # Who has seen no log is told by its end.
    with pytest.raises(UnexpectedStatusException, match=r"Traceback.*\n.*train\.py"):
        session.wait_for_job(folder_of(estimator).name)
    job = folder_of(estimator)
    assert "planted failure" in (job.output / "failure").read_text()
    assert job.status().exit_code == 1


@pytest.mark.parametrize(
    ("script", "reason", "code"),
    [
        ("raise KeyError('x')", "algo-1: KeyError: 'x' (exit code 1)", 1),
        ("import os; os.kill(os.getpid(), 9)", "algo-1: killed by SIGKILL", 137),
        pytest.param("import sys; sys.exit(3)", "algo-1: exit code 3", 3, marks=pytest.mark.slow),
        pytest.param(
            "import os; open('../output/failure', 'w').write('own word'); exit(4)",
            "own word",
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failing_script_is_a_failed_job(
    session: Session, script: str, reason: str, code: int
) -> None:
    estimator = make(session, script)
    with pytest.raises(UnexpectedStatusException) as error:
        estimator.fit(logs=False)
    assert f"AlgorithmError: {reason}" in str(error.value)
    assert folder_of(estimator).status().exit_code == code


def test_every_rank_saves_when_a_job_is_stopped(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator = started(session, SAVES, ranks=2)
    name = folder_of(estimator).name
    assert cli.main(["--jobs", str(session.root), "where", name]) == 0
    assert capsys.readouterr().out.endswith("in <module>: time.sleep(100)\n")
    session.stop_training_job(name)
    found = ended(estimator)
    assert (found["TrainingJobStatus"], found["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert names_in(estimator.model_data) == ["ready0", "ready1", "saved0", "saved1"]
    assert cli.main(["--jobs", str(session.root), "where", name]) == 2


def test_a_deaf_script_is_killed_after_its_time(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_STOP_GRACE_SECONDS", "0.5")
    estimator = started(session, DEAF, max_run=1)
    found = ended(estimator)
    assert (found["TrainingJobStatus"], found["SecondaryStatus"]) == (
        "Stopped",
        "MaxRuntimeExceeded",
    )
    assert names_in(estimator.model_data) == ["ready0"]


def test_a_supervisor_that_is_killed_leaves_a_failed_job_and_nothing_else(session: Session) -> None:
    estimator = started(session, "import os; os.environ['X'] = '1'" + SAVES, ranks=2)
    job = folder_of(estimator)
    (supervisor,) = [pid for pid in processes_of(session.root) if b"supervisor" in cmdline(pid)]
    children = descendants(supervisor)
    assert len(children) > 2
    os.kill(supervisor, signal.SIGKILL)
    with pytest.raises(UnexpectedStatusException, match="the supervisor of the job is gone"):
        ended(estimator)
    assert job.status().training_job_status == "Failed"
    wait_until(lambda: not [pid for pid in children if cmdline(pid)], "ranks are left")


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_job_is_found_again_and_followed(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    go_on = session.root.parent / "go-on"
    script = f"""
import pathlib, time
print("begun", flush=True)
while not pathlib.Path({str(go_on)!r}).exists():
    time.sleep(0.05)
print("done")
"""
    estimator = make(session, script)
    estimator.fit(wait=False)
    name = folder_of(estimator).name
    words = ["--jobs", str(session.root)]
    wait_until(lambda: "begun" in log_of(estimator), "the script does not start")
    assert cli.main([*words, "list"]) == 0
    assert "InProgress" in capfd.readouterr().out
    go_on.touch()
    again = PyTorch.attach(name, session)
    assert "begun\ndone\n" in capfd.readouterr().out
    assert again.entry_point == "train.py"
    assert cli.main([*words, "show", name]) == 0
    assert "Completed" in capfd.readouterr().out
    assert cli.main([*words, "logs", name]) == 0
    assert capfd.readouterr().out == "begun\ndone\n"
    assert cli.main([*words, "stop", name]) == 0
    assert "has ended: Completed" in capfd.readouterr().out
    assert cli.main([*words, "show", "other"]) == 2
    assert f"there is no job 'other' in {session.root}" in capfd.readouterr().err


def test_a_document_runs_again(session: Session, tmp_path: Path) -> None:
    estimator = make(session, "print(1)", code_location=str(tmp_path / "kept"))
    estimator.fit(logs=False, job_name="first")
    assert (tmp_path / "kept/first/source/sourcedir.tar.gz").is_file()
    document = session.job("first").request().as_json() | {"TrainingJobName": "second"}
    (tmp_path / "again.json").write_text(json.dumps(document))
    words = ["--jobs", str(session.root)]
    assert cli.main([*words, "submit", str(tmp_path / "again.json")]) == 0
    assert cli.main([*words, "wait", "second"]) == 0
    # From the archive of the first job, by its address.
    assert cli.main([*words, "submit", str(tmp_path / "again.json")]) == 2


def test_ctrl_c_leaves_the_job_running(session: Session) -> None:
    make(session, SAVES)
    program = f"""
from smdistributed.modelparallel.launch.pytorch import PyTorch
PyTorch("train.py", source_dir={str(session.root.parent / "code")!r}).fit(job_name="job-1")
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "SMP_JOBS": str(session.root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line == "ready\n":
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=LIMIT_SECONDS)
    assert "'smp-launch stop job-1' ends it" in err
    job = session.job("job-1")
    assert session.observe(job).training_job_status == "InProgress"
    session.stop_training_job("job-1")
    assert session.wait_for_job("job-1")["TrainingJobStatus"] == "Stopped"


def test_a_full_disk_is_a_failed_job(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = LocalBackend.submit

    def submit_on_full_disk(self: LocalBackend, folder: JobFolder) -> None:
        (folder.logs / "algo-1.log").symlink_to("/dev/full")
        submit(self, folder)

    monkeypatch.setattr(LocalBackend, "submit", submit_on_full_disk)
    with pytest.raises(UnexpectedStatusException, match="No space left on device"):
        make(session, SAVES).fit(logs=False)


def test_results_that_cannot_be_kept_are_a_failure(session: Session, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"""
import os, pathlib, shutil
pathlib.Path(os.environ["SM_MODEL_DIR"], "a").touch()
shutil.rmtree({str(out)!r})
pathlib.Path({str(out)!r}).touch()
"""
    with pytest.raises(UnexpectedStatusException, match="results were not kept: "):
        make(session, script, output_path=str(out)).fit(logs=False)
    with pytest.raises(StorageError, match="results must be writable"):
        make(session, script, output_path=str(out)).fit(logs=False)


def test_a_job_can_be_stopped_before_its_script_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = LocalBackend.submit

    def stop_first(self: LocalBackend, folder: JobFolder) -> None:
        self.stop(folder)
        submit(self, folder)

    monkeypatch.setattr(LocalBackend, "submit", stop_first)
    estimator = make(session, "raise SystemExit(1)")
    estimator.fit(logs=False)
    assert folder_of(estimator).status().training_job_status == "Stopped"
    assert folder_of(estimator).status().training_start_time is None


@pytest.mark.slow
def test_tensorboard_is_offered(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    estimator = make(session, "print(1)")
    estimator.fit(run_tensorboard_locally=True)
    assert f"tensorboard --logdir {folder_of(estimator).path}" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="must come with wait"):
        estimator.fit(run_tensorboard_locally=True, wait=False)


def test_checkpoints_outlive_their_job(session: Session) -> None:
    script = """
import pathlib, sys, time
place = pathlib.Path(sys.argv[2])
old = place / "step"
step = int(old.read_text()) + 1 if old.exists() else 1
old.write_text(str(step))
for number in range(3 * (step == 1)):
    brief = place / f"brief-{number}"
    brief.write_text(str(number))
    time.sleep(0.7)
    brief.unlink()
print("step", step)
sys.exit(step == 1)
"""
    given = {"checkpoint_s3_uri": "s3://b/run", "hyperparameters": {"to": "/opt/ml/checkpoints"}}
    estimator = make(session, script, **given)
    with pytest.raises(UnexpectedStatusException):
        estimator.fit(logs=False)
    estimator.fit(logs=False)
    assert "restored from s3://b/run" in log_of(estimator)
    assert "step 2" in log_of(estimator)
    kept = {path.name: path.read_text() for path in (session.root / "s3/b/run").iterdir()}
    assert kept == {"step": "2", "brief-0": "0", "brief-1": "1", "brief-2": "2"}


def test_servers_end_when_the_chief_is_done(session: Session) -> None:
    script = """
import json, os, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
print("task", task["type"], task["index"], flush=True)
if task["type"] != "chief":
    time.sleep(100)
"""
    code = session.root.parent / "train.py"
    code.write_text(script)
    servers = {"parameter_server": {"enabled": True}}
    estimator = TensorFlow(
        entry_point=str(code), instance_count=2, distribution=servers, sagemaker_session=session
    )
    estimator.fit(logs=False)
    logs = folder_of(estimator).logs
    said = {path.stem: path.read_text() for path in logs.glob("algo-*.log")}
    assert said["algo-1"] == "task chief 0\n"
    assert set(said) == {"algo-1", "algo-2", "algo-1-ps", "algo-2-ps"}


@pytest.mark.slow
def test_a_server_that_fails_ends_the_job(session: Session) -> None:
    script = """
import json, os, time
if json.loads(os.environ["TF_CONFIG"])["task"] == {"type": "ps", "index": 1}:
    raise ValueError("planted")
time.sleep(100)
"""
    code = session.root.parent / "train.py"
    code.write_text(script)
    servers = {"parameter_server": {"enabled": True}}
    estimator = TensorFlow(
        entry_point=str(code), instance_count=2, distribution=servers, sagemaker_session=session
    )
    with pytest.raises(UnexpectedStatusException, match="algo-2-ps: ValueError: planted"):
        estimator.fit(logs=False)


LITERAL = """
import pathlib, time
place = pathlib.Path("/opt/ml/model")
name = pathlib.Path("/opt/ml/request.json").read_text().partition('"TrainingJobName": "')[2][:5]
(place / name).touch()
while not pathlib.Path("/opt/ml/input/go-on").exists():
    time.sleep(0.05)
"""


@pytest.mark.skipif(not literal_paths.can_be_shown(), reason="needs root, and mount namespaces")
def test_hosts_reach_each_other_by_their_names(session: Session) -> None:
    script = """
import json, os, socket
first, *_ = json.loads(os.environ["SM_HOSTS"])
if os.environ["SM_CURRENT_HOST"] == first:
    server = socket.create_server((first, 0))
    port = os.path.join(os.environ["SM_OUTPUT_DIR"], "port")
    with open(port + "-", "w") as file:
        file.write(str(server.getsockname()[1]))
    os.rename(port + "-", port)
    print("heard", server.accept()[0].recv(9))
else:
    while not os.path.exists(port := os.path.join(os.environ["SM_OUTPUT_DIR"], "port")):
        pass
    socket.create_connection((first, int(open(port).read()))).send(b"word")
"""
    estimator = make(session, script, instance_count=2)
    estimator.fit(logs=False)
    assert "heard b'word'" in log_of(estimator)
    assert "algo-1" not in Path("/etc/hosts").read_text()


@pytest.mark.skipif(not literal_paths.can_be_shown(), reason="needs root, and mount namespaces")
def test_literal_paths_are_the_folder_of_each_job(session: Session) -> None:
    estimator = make(session, LITERAL)
    for name in ("job-1", "job-2"):
        estimator.fit(wait=False, job_name=name)
    folders = [session.job(name) for name in ("job-1", "job-2")]
    for folder in folders:
        wait_until(lambda: list(folder.model.iterdir()), "no script")  # noqa: B023 - used here
        (folder.path / "input/go-on").touch()
    for folder in folders:
        session.wait_for_job(folder.name)
        assert [path.name for path in folder.model.iterdir()] == [folder.name]


def test_without_root_the_log_says_what_does_not_work(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Nothing is found on this path, unshare among it; the supervisor is started by its full path.
    monkeypatch.setenv("PATH", str(tmp_path))
    estimator = make(session, "print('done', __file__ or '/opt/ml')", instance_count=2)
    estimator.fit(logs=False)
    assert "smp-launch: algo-1 and the like are no addresses here" in log_of(estimator)
    assert "smp-launch: the script names /opt/ml, which is not there" in log_of(estimator)
