"""A job as a manifest, against the models that Kubeflow's trainer publishes of its API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from smdistributed.modelparallel.launch.cli import main

LINE = "manifest --image registry/train:1"


def rendered(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    """Returns the manifest of a command line; the models know each of its fields."""
    assert main(f"{LINE} {words}".split()) == 0, capsys.readouterr().err
    document: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    model = TrainerV1alpha1TrainJob.from_dict(document)
    assert model is not None
    # Fields that they do not know would be lost.
    assert model.to_dict() == document
    return document


def test_a_job_is_a_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    document = rendered(
        capsys,
        "--nodes 2 --processes 4 --set pipeline_parallel_degree=4 --set ddp=true --env A=b=c "
        "--volume data:/data --volume results:/out train.py --steps 3",
    )
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert (document["kind"], document["metadata"]) == ("TrainJob", {"name": "train"})
    spec = document["spec"]
    trainer = spec["trainer"]
    assert (trainer["command"], trainer["args"]) == (["torchrun"], ["train.py", "--steps", "3"])
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    variables = {each["name"]: each["value"] for each in trainer["env"]}
    assert variables.pop("A") == "b=c"
    (parameters,) = variables.values()
    assert json.loads(parameters) == {"pipeline_parallel_degree": 4, "ddp": True}
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    claims = {e["name"]: e["persistentVolumeClaim"]["claimName"] for e in pod["volumes"]}
    (container,) = pod["containers"]
    places = {claims[each["name"]]: each["mountPath"] for each in container["volumeMounts"]}
    assert places == {"data": "/data", "results": "/out"}


def test_without_gpus_nothing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = rendered(capsys, "--gpus 0 --name a-b train.py")["spec"]["trainer"]
    assert "resourcesPerNode" not in trainer
    assert "env" not in trainer


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--name My_Job train.py", "--name must be 1 to 40 small letters"),
        ("--nodes 0 train.py", "--nodes must be at least 1; got 0"),
        ("--processes 4 --gpus 2 train.py", "each process takes one; got 2 and 4"),
        ("--set pipeline_parallel_degree=3 --processes 4 train.py", "start 3 or 6 processes"),
        ("--set microbatch=3 train.py", "did you mean microbatches"),
        ("--env SM_HP_MP_PARAMETERS={} train.py", "go to --set"),
        ("--volume data train.py", "--volume takes A:B"),
        ("--volume data:here train.py", "got the place 'here'"),
        ("SCRIPT", "a script of TensorFlow needs MPI"),
    ],
)
def test_what_no_cluster_could_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    script = tmp_path / "keras.py"
    script.write_text("import smdistributed.modelparallel.tensorflow as smp\n")
    assert main(f"{LINE} {words.replace('SCRIPT', str(script))}".split()) == 2
    assert told in capsys.readouterr().err
