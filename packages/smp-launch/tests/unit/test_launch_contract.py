"""What a script sees; ``nox -s long -- launch`` holds all of it against the training toolkit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.gpus import usable_gpus
from smdistributed.modelparallel.launch.job import contract
from smdistributed.modelparallel.launch.job.commands import commands_of
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.warden import guarded
from smdistributed.modelparallel.launch.request import document, hyperparameters

IMAGE = "tensorflow-training:2.21.0-cpu"


def request_of(values: dict[str, Any], count: int = 1, **more: Any) -> document.TrainingJob:
    return document.read(
        {
            "TrainingJobName": "job-1",
            "AlgorithmSpecification": {"TrainingImage": IMAGE},
            "HyperParameters": hyperparameters.encode(values),
            "OutputDataConfig": {"S3OutputPath": "/out"},
            "ResourceConfig": {"InstanceType": "local", "InstanceCount": count},
            **more,
        }
    )


def host_of(count: int, index: int = 0) -> contract.Host:
    return contract.hosts(count, (), share_a_machine=True)[index]


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    found = JobFolder(tmp_path / "job-1")
    found.code.mkdir(parents=True)
    for name in ("train.py", "train.sh"):
        (found.code / name).touch()
    (tmp_path / "outside.py").touch()
    return found


def test_arguments_are_those_of_the_toolkit() -> None:
    values = {"lr": 0.1, "x": 1, "on": True, "none": None, "mp": {"b": True, "a": 2}, "l": [1, "b"]}
    assert contract.arguments(values) == [
        *("-l", "[1, 'b']", "--lr", "0.1", "--mp", "a=2,b=True"),
        *("--none", "", "--on", "True", "-x", "1"),
    ]


def test_paths_of_a_container_are_the_folders(folder: JobFolder) -> None:
    values = {"a": "/opt/ml/model", "b": "/opt/ml", "c": "/opt/mlx", "d": ["/opt/ml/model"]}
    assert contract.values(folder, request_of(values)) == {
        "a": str(folder.model),
        "b": str(folder.path),
        "c": "/opt/mlx",
        "d": ["/opt/ml/model"],
    }
    request = request_of({}, Environment={"CACHE": "/opt/ml/checkpoints"})
    environ = contract.environment(folder, request, host_of(1))
    assert environ["CACHE"] == str(folder.checkpoints)


def test_variables_are_json_unless_they_are_texts(folder: JobFolder) -> None:
    request = request_of({"name": "a b", "on": True, "mp_parameters": {"partitions": 2}}, 2)
    environ = contract.environment(folder, request, host_of(2, 1))
    assert environ["SM_HP_NAME"] == "a b"
    assert environ["SM_HP_ON"] == "true"
    assert environ["SM_HP_MP_PARAMETERS"] == '{"partitions":2}'
    assert environ["SM_HOSTS"] == '["algo-1","algo-2"]'
    assert environ["SM_CURRENT_HOST"] == environ["CURRENT_HOST"] == "algo-2"
    assert environ["SM_MODEL_DIR"] == str(folder.model)
    assert json.loads(environ["SM_TRAINING_ENV"])["is_master"] is False


def test_the_users_environment_comes_last(folder: JobFolder) -> None:
    request = request_of({}, Environment={"SM_LOG_LEVEL": "10"})
    environ = contract.environment(folder, request, host_of(1))
    assert environ["SM_LOG_LEVEL"] == "10"
    assert "TF_ENABLE_ONEDNN_OPTS" not in environ
    request = request_of({}, Environment={"TF_DISABLE_MKL": "1"})
    environ = contract.environment(folder, request, host_of(1))
    assert environ["TF_ENABLE_ONEDNN_OPTS"] == "0"


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        (None, ("0", "2", "10")),
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("0, 3,GPU-1", ("0", "3", "GPU-1")),
    ],
)
def test_gpus_are_those_that_processes_may_use(
    tmp_path: Path, visible: str | None, wanted: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert usable_gpus(environ, tmp_path) == wanted


def test_hosts_that_are_parts_of_a_machine_share_its_gpus_out(folder: JobFolder) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    by_torchrun = {"sagemaker_pytorch_ddp_enabled": True}
    request = request_of({"sagemaker_program": "train.py", **by_torchrun}, 2)
    commands = commands_of(folder, request, 1, environ)
    assert [each.environ["CUDA_VISIBLE_DEVICES"] for each in commands] == ["4,5", "6,7"]
    assert [each.environ["SM_NUM_GPUS"] for each in commands] == ["2", "2"]
    assert all("--nproc-per-node=2" in each.words for each in commands)
    by_mpi = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
    request = request_of({"sagemaker_program": "train.py", **by_mpi}, 2)
    (command,) = commands_of(folder, request, 1, environ)
    assert command.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    others = json.loads(command.environ["SMP_HOST_VARIABLES"])
    assert others == {"algo-2": {"CUDA_VISIBLE_DEVICES": "6,7"}}
    (command,) = commands_of(folder, request, 1, {"CUDA_VISIBLE_DEVICES": "4"})
    assert command.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_script_runs_once_on_each_host(folder: JobFolder) -> None:
    request = request_of({"sagemaker_program": "train.py", "lr": 1}, 2)
    inherited = {"PYTHONPATH": "/x", "SM_HP_OLD": "1", "HOME": "/home"}
    first, second = commands_of(folder, request, 120, inherited)
    assert first.words == guarded((sys.executable, "-u", "train.py", "--lr", "1"), 120)
    assert (first.host, second.host) == ("algo-1", "algo-2")
    assert second.environ["SM_CURRENT_HOST"] == "algo-2"
    assert first.environ["PYTHONPATH"] == f"{folder.code}:/x"
    assert first.environ["HOME"] == "/home"
    assert "SM_HP_OLD" not in first.environ
    (shell,) = commands_of(folder, request_of({"sagemaker_program": "train.sh"}), 120, {})
    assert shell.words == guarded(("/bin/sh", "train.sh"), 120)


def test_mpi_is_one_smprun_for_all_hosts(folder: JobFolder) -> None:
    values = {
        "sagemaker_program": "train.py",
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
        "sagemaker_mpi_custom_mpi_options": "-x A=1",
        "lr": 1,
    }
    (command,) = commands_of(folder, request_of(values, 2), 30, {})
    launcher = ("-m", "smdistributed.modelparallel.common.launcher")
    options = ("--framework=tensorflow", "--grace=30", "--mpi-args=-x A=1")
    assert command.words == (
        *(sys.executable, *launcher, "-n", "4", *options, "train.py", "--lr", "1"),
    )


@pytest.mark.parametrize(
    ("more", "restarts"),
    [
        ({"EnableManagedSpotTraining": True}, ["--restarts=30"]),
        ({"RetryStrategy": {"MaximumRetryAttempts": 3}}, ["--restarts=3"]),
        (
            {"EnableManagedSpotTraining": True, "RetryStrategy": {"MaximumRetryAttempts": 3}},
            ["--restarts=3"],
        ),
        ({}, []),
    ],
)
def test_a_job_that_may_be_interrupted_starts_again(
    folder: JobFolder, more: dict[str, Any], restarts: list[str]
) -> None:
    values = {"sagemaker_program": "train.py", "sagemaker_mpi_enabled": True}
    (command,) = commands_of(folder, request_of(values, **more), 30, {})
    assert [word for word in command.words if "restarts" in word] == restarts


@pytest.mark.parametrize("program", ["", "missing.py", "../outside.py", "/bin/true"])
def test_a_program_is_a_file_of_the_code(folder: JobFolder, program: str) -> None:
    with pytest.raises(ConfigError, match="must be a file of the code"):
        commands_of(folder, request_of({"sagemaker_program": program}), 120, {})
