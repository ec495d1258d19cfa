"""The folder of a job: one writer, and no job in progress for ever."""

from __future__ import annotations

import io
import os
import pickle
import stat
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.backends.local import LocalBackend
from smdistributed.modelparallel.launch.exceptions import (
    LaunchError,
    UnexpectedStatusException,
    UnknownJobError,
)
from smdistributed.modelparallel.launch.job import folder, logs, metrics, status
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.request import document


def make(root: Path, name: str = "job-1") -> JobFolder:
    request = document.read(
        {
            "TrainingJobName": name,
            "AlgorithmSpecification": {},
            "OutputDataConfig": {"S3OutputPath": "/out"},
            "ResourceConfig": {"InstanceCount": 1},
        }
    )
    with folder.created(root, request, status.new({"kind": "local"})) as made:
        return made


def test_a_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    made = make(tmp_path / "jobs")
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(made.root.stat().st_mode) == 0o700
    assert made.request().training_job_name == "job-1"


def test_names_of_jobs_are_taken_once(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match=r"there is a job job-1 in .*choose another job_name"):
        make(tmp_path)
    assert folder.find(tmp_path, "job-1").status().training_job_status == "InProgress"


def test_a_job_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    request = make(tmp_path, "other").request().model_copy(update={"training_job_name": "job-2"})

    def start() -> None:
        with folder.created(tmp_path, request, status.new({})):
            raise LaunchError("no")

    with pytest.raises(LaunchError):
        start()
    assert not (tmp_path / "job-2").exists()


def test_an_unknown_job_lists_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownJobError, match="the jobs there are: none"):
        folder.find(tmp_path / "nowhere", "x")
    make(tmp_path)
    for name in ("job-2", "..", "job-1/.", ""):
        with pytest.raises(UnknownJobError, match="the jobs there are: job-1"):
            folder.find(tmp_path, name)


def test_a_job_whose_supervisor_is_gone_has_failed(tmp_path: Path) -> None:
    made, backend = make(tmp_path), LocalBackend()
    held = made.lock()
    assert held is not None
    assert made.lock() is None
    assert backend.observe(made).training_job_status == "InProgress"
    os.close(held)
    found = backend.observe(made)
    assert found.training_job_status == "Failed"
    assert "the supervisor of the job is gone" in (found.failure_reason or "")
    assert made.status() == found


def test_an_end_is_never_overwritten(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.write_status(made.status().entering("Completed", training_job_status="Completed"))
    assert made.bury("gone").training_job_status == "Completed"


def test_a_folder_that_cannot_be_written_does_not_say_that_a_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JobFolder, "write_status", full)
        assert LocalBackend().observe(made).training_job_status == "Failed"
    with monkeypatch.context() as patch:
        patch.setattr(JobFolder, "lock", full)
        assert LocalBackend().observe(made).training_job_status == "Failed"


def test_a_damaged_status_says_what_to_do(tmp_path: Path) -> None:
    made = make(tmp_path)
    (made.path / "status.json").write_text("{")
    with pytest.raises(LaunchError, match=r"cannot be read: .*Delete /"):
        made.status()
    assert folder.all_jobs(tmp_path) == [made]


def test_phases_have_times(tmp_path: Path) -> None:
    now = status.new({}).entering("Training", "go").failed("boom\nmore", 3)
    started, trained, failed = now.secondary_status_transitions
    assert started.end_time is not None
    assert started.end_time == trained.start_time
    assert failed.end_time is not None
    assert (failed.status, failed.status_message) == ("Failed", "boom")
    assert (now.failure_reason, now.exit_code) == ("boom\nmore", 3)


def test_a_follower_shows_phases_and_logs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0)
    made, out = make(tmp_path), io.StringIO()
    states = [made.status().entering("Training")]
    states.append(states[-1].entering("Completed", training_job_status="Completed"))
    log = made.logs / "algo-1.log"

    def observe() -> status.Status:
        with log.open("ab") as stream:
            stream.write(b"[0] 10%\r[0] 20%\r[0] loss: 1\n[1] half")
        return states.pop(0)

    with logs.Follower(made, observe, out) as follower:
        follower.show(until_end=True)
    shown = out.getvalue().replace("\r", "\\r\n").splitlines()
    assert [line[9:] for line in shown[:2]] == [
        "Starting: Starting the supervisor of the job",
        "Training",
    ]
    assert shown[2:5] == ["[0] 10%\\r", "[0] 20%\\r", "[0] loss: 1"]
    assert shown[5] == "[1] half[0] 10%\\r", "a line goes on where it was"
    assert shown[-2] == "[1] half"
    assert shown[-1][9:] == "Completed"


def test_ranks_and_hosts_have_colours_on_a_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    made, out = make(tmp_path), Terminal()
    for name in ("algo-1", "algo-2", "algo-10"):
        (made.logs / f"{name}.log").write_text(f"[1] {name}\n")
    done = made.status().entering("Completed", training_job_status="Completed")
    with logs.Follower(made, lambda: done, out, with_phases=False) as follower:
        follower.show(until_end=False)
    first, second, third = out.getvalue().splitlines()
    assert first.endswith("\x1b[32m[1]\x1b[0m algo-1")
    assert "algo-2" in second
    assert third.startswith("\x1b[34malgo-10\x1b[0m ")


def test_metrics_are_found_in_lines(tmp_path: Path) -> None:
    definitions = [
        document.Metric(name="loss", regex="loss: ([-+.e0-9]+)"),
        document.Metric(name="word", regex="word: (.*)"),
    ]
    recorder = metrics.Recorder(definitions, tmp_path / "m")
    for line in ("[0] loss: 2.5", "nothing", "[1] loss: 1e-3 word: one", "loss: -"):
        recorder.look_at(line)
    values = [(each["MetricName"], each["Value"]) for each in metrics.read(tmp_path / "m")]
    assert values == [("loss", 2.5), ("loss", 0.001)]
    assert [each["Value"] for each in recorder.final] == [0.001]
    assert not list(metrics.read(tmp_path / "none"))


def test_errors_survive_a_pipe() -> None:
    error = UnexpectedStatusException("failed", ["Completed"], "Failed")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.allowed_statuses, again.actual_status) == (
        "failed",
        ("Completed",),
        "Failed",
    )
