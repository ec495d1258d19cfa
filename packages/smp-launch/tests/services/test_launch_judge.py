"""The training toolkit of the service's containers is the judge of what a script sees.

It prepares a script in the same folder, from the same files; variables, arguments and the folder
that the script starts in must be equal, but for what is listed here: ``nox -s long -- launch``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.launch.job import contract
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.request import document, hyperparameters

pytestmark = pytest.mark.timeout(120)

#: The toolkit waits until each name of a host is known to the resolver.
HOST = "localhost"
SEES = """
import json, os, sys
seen = {"environ": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd()}
json.dump(seen, open(os.environ["SEEN"], "w"))
"""
#: Shapes of hyperparameters, several of which the toolkit writes in ways of its own.
SHAPES: dict[str, Any] = {
    "integer": 3,
    "negative": -1,
    "big": 10**20,
    "float": 0.1,
    "small": 1e-7,
    "infinite": 1e300,
    "yes": True,
    "no": False,
    "nothing": None,
    "text": "a b",
    "empty": "",
    "quoted": 'it\'s "so"',
    "json-like": '{"a": 1}',
    "number-like": "007",
    "path": "/data/x",
    "unicode": "grün",
    "newline": "a\nb",
    "equals": "a=b,c=d",
    "dashes": "--flag",
    "list": [1, 2.5, "x"],
    "empty_list": [],
    "nested_list": [[1], {"a": None}],
    "dict": {"b": True, "a": 1},
    "empty_dict": {},
    "nested_dict": {"a": {"b": [1, 2]}},
    "x": 1,
    "y": {"z": 1},
    "with-dash": 1,
    "with.dot": 2,
    "Upper": 3,
    "mp_parameters": {"partitions": 2, "microbatches": 4, "ddp": True, "pipeline": "simple"},
    "sagemaker_mpi_enabled": False,
    "sagemaker_mpi_num_of_processes_per_host": 2,
    "sagemaker_mpi_custom_mpi_options": "-x A=1",
    "sagemaker_instance_type": "ml.p3.16xlarge",
    "sagemaker_distributed_dataparallel_enabled": False,
    "sagemaker_unknown": {"a": 1},
}


def request_of(submit: Path) -> document.TrainingJob:
    values = {
        **SHAPES,
        hyperparameters.PROGRAM: "train.py",
        hyperparameters.SUBMIT_DIRECTORY: str(submit),
        hyperparameters.LOG_LEVEL: 20,
        hyperparameters.JOB_NAME: "job-1",
        hyperparameters.REGION: "local",
    }
    channels = [
        {
            "ChannelName": name,
            "DataSource": {"FileDataSource": {"FileUri": "/data"}},
            **more,
        }
        for name, more in (("train", {}), ("eval-2", {"ContentType": "text/csv"}))
    ]
    return document.read(
        {
            "TrainingJobName": "job-1",
            "AlgorithmSpecification": {"TrainingInputMode": "File"},
            "HyperParameters": hyperparameters.encode(values),
            "InputDataConfig": channels,
            "OutputDataConfig": {"S3OutputPath": "/out"},
            "ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
        }
    )


def test_the_script_sees_what_the_toolkit_shows(tmp_path: Path) -> None:
    submit = tmp_path / "submit"
    submit.mkdir()
    (submit / "train.py").write_text(SEES)
    folder = JobFolder(tmp_path / "job")
    for place in (folder.config, folder.data, folder.model, folder.output / "data"):
        place.mkdir(parents=True)
    request = request_of(submit)
    host = contract.Host(HOST, (HOST,), os.cpu_count() or 1, 0)
    for name, content in contract.config_files(request, host).items():
        (folder.config / name).write_text(json.dumps(content))
    before = {
        "SEEN": str(tmp_path / "seen.json"),
        "SAGEMAKER_BASE_DIR": str(folder.path),
        "TRAINING_JOB_NAME": "job-1",
        "PATH": os.environ["PATH"],
    }
    toolkit = str(Path(sys.executable).parent / "train")
    done = subprocess.run(
        [toolkit], env=before, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    seen = json.loads((tmp_path / "seen.json").read_text())
    theirs = {k: v for k, v in seen["environ"].items() if k.startswith(("SM_", "SAGEMAKER_J"))}
    ours = {
        name: text
        for name, text in contract.environment(folder, request, host).items()
        if name.startswith(("SM_", "SAGEMAKER_J"))
    }
    # The toolkit calls the name of the job by other names only.
    assert ours.pop("SM_JOB_NAME") == "job-1"
    assert json.loads(ours.pop("SM_TRAINING_ENV")) == json.loads(theirs.pop("SM_TRAINING_ENV"))
    assert ours == theirs
    assert len(ours) > 60
    assert seen["environ"]["CURRENT_HOST"] == HOST
    user = hyperparameters.of_script(contract.values(folder, request))
    assert ["train.py", *contract.arguments(user)] == seen["argv"]
    assert seen["cwd"] == str(folder.code)
