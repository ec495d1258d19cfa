"""The document that describes a job: what it takes, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.request import document, hyperparameters, naming
from smdistributed.modelparallel.launch.session import Session

REQUEST: dict[str, Any] = {
    "TrainingJobName": "job-1",
    "AlgorithmSpecification": {"TrainingImage": "pytorch-training", "TrainingInputMode": "File"},
    "OutputDataConfig": {"S3OutputPath": "s3://b/out", "KmsKeyId": ""},
    "ResourceConfig": {
        "InstanceType": "ml.p3.2xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 30,
    },
    "InputDataConfig": [
        {
            "ChannelName": "train",
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/data"}},
        }
    ],
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "HyperParameters": {"lr": "0.1"},
    "EnableManagedSpotTraining": False,
}


def changed(path: str, value: Any) -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    *before, last = path.split(".")
    place: Any = request
    for step in before:
        place = place[int(step) if step.isdecimal() else step]
    place[last] = value
    return request


def test_a_document_comes_back_as_it_was() -> None:
    assert document.read(REQUEST).as_json() == REQUEST


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("TrainingJobName", "../up", r"TrainingJobName must have letters .* got '\.\./up'"),
        ("TrainingJobName", "a" * 64, r"at most 63"),
        ("TrainingJobName", "job\n", r"TrainingJobName must have"),
        ("InputDataConfig.0.ChannelName", "..", r"InputDataConfig\.0\.ChannelName must have"),
        ("InputDataConfig.0.ChannelName", "a/b", r"ChannelName must have"),
        ("InputDataConfig.0.DataSource", {}, r"names one source; got none"),
        ("InputDataConfig", [REQUEST["InputDataConfig"][0]] * 2, r"got train twice"),
        ("ResourceConfig.InstanceCont", 1, r"did you mean ResourceConfig\.InstanceCount"),
        ("ResourceConfig.InstanceCount", 0, r"ResourceConfig\.InstanceCount: .* got 0"),
        ("HyperParametrs", {}, r"did you mean HyperParameters"),
        ("AlgorithmSpecification.TrainingInputMode", "Pip", r"'File', 'Pipe' or 'FastFile'"),
    ],
)
def test_what_breaks_a_rule_is_an_error(path: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        document.read(changed(path, value))


def test_every_problem_is_listed() -> None:
    request = changed("ResourceConfig.InstanceCount", 0)
    del request["OutputDataConfig"]
    with pytest.raises(ConfigError) as error:
        document.read(request)
    assert "OutputDataConfig must be there; it is missing." in str(error.value).splitlines()
    assert len(str(error.value).splitlines()) == 2


def test_hyperparameters_are_json() -> None:
    values = {"lr": 0.1, "name": "a b", "on": True, "none": None, "mp": {"a": [1, 2]}}
    assert hyperparameters.decode(hyperparameters.encode(values)) == values
    assert hyperparameters.decode({"by_hand": "plain text"}) == {"by_hand": "plain text"}
    with_own = {"lr": 1, "sagemaker_program": "train.py", "sagemaker_mpi_enabled": True}
    assert hyperparameters.of_script(with_own) == {"lr": 1}
    assert hyperparameters.of_framework(with_own) == {"sagemaker_mpi_enabled": True}


@pytest.mark.parametrize(
    ("name", "framework", "version", "python"),
    [
        ("123.host/pytorch-training:1.12.0-gpu-py38", "pytorch", "1.12.0", "py38"),
        ("host:5000/a/tensorflow-training:2.6-cpu", "tensorflow", "2.6", None),
        ("sagemaker-tensorflow-scriptmode:1.12-cpu-py3", "tensorflow", "1.12", "py3"),
        (
            "huggingface-pytorch-training:1.10.2-transformers4.17.0-gpu-py38-cu113",
            "pytorch",
            "1.10.2",
            "py38",
        ),
        ("my/pytorch:1.0", None, "1.0", None),
        ("pytorch-training@sha256:0123", "pytorch", None, None),
    ],
)
def test_images_of_frameworks_are_known_by_their_names(
    name: str, framework: str | None, version: str | None, python: str | None
) -> None:
    image = naming.parse_image(name)
    assert (image.framework, image.framework_version, image.py_version) == (
        framework,
        version,
        python,
    )


def test_names_of_jobs_have_the_time() -> None:
    name = naming.job_name("SMD-MP-demo", 1_000_000_000.25)
    assert name == "SMD-MP-demo-2001-09-09-01-46-40-250"
    assert naming.base_of(name) == "SMD-MP-demo"
    long = naming.job_name("a-" * 40 + "a")
    assert len(long) <= 63
    document.read(changed("TrainingJobName", long))


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("ssh", "smprun --hosts"), ("kubernetes", "in a pod"), ("docker", "in a container")],
)
def test_a_back_end_that_is_not_there_is_refused_with_a_way_out(
    tmp_path: Path, name: str, way_out: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"back-end '{name}' is not offered: .*{way_out}"):
        Session(root=tmp_path, backend=name)
