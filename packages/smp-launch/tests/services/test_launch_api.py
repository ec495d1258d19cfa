"""The unmodified SDK and boto3 as clients of the interface on the loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from smdistributed.modelparallel.launch.api import server
from smdistributed.modelparallel.launch.exceptions import ModelError
from smdistributed.modelparallel.launch.serving.service import Serving
from smdistributed.modelparallel.launch.session import Session

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

TRAINS = """
import argparse, os
from mpi4py import MPI
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
arguments, _ = parser.parse_known_args()
world = MPI.COMM_WORLD
for step in range(arguments.steps):
    total = world.allreduce(step + world.rank)
    if world.rank == 0:
        print(f"step {step} loss: {total}", flush=True)
if world.rank == 0:
    print("files", os.listdir(os.environ["SM_CHANNEL_TRAIN"]), os.environ["SM_HP_MP_PARAMETERS"])
    open(os.path.join(os.environ["SM_MODEL_DIR"], "weights"), "w").write("w")
"""
LISTS = """
import os
print("lists", os.listdir(os.environ["SM_CHANNEL_TRAIN"]))
open(os.path.join(os.environ["SM_MODEL_DIR"], "weights"), "w").write("w")
"""
#: What a published notebook does, with the unmodified SDK.
NOTEBOOK = """
import os, tarfile
import boto3, sagemaker
from sagemaker.analytics import ExperimentAnalytics
from sagemaker.experiments.run import Run, list_runs
from sagemaker.pytorch import PyTorch

boto_session = boto3.session.Session()
account = boto3.client("sts").get_caller_identity()["Account"]
client = boto_session.client("sagemaker")
session = sagemaker.session.Session(boto_session=boto_session, sagemaker_client=client)
role = sagemaker.get_execution_role()
assert session.account_id() == account
assert sagemaker.get_execution_role(session) == role
assert boto3.client("iam").get_role(RoleName=role.rpartition("/")[2])["Role"]["Arn"] == role
print("ROLE", role)
bucket = session.default_bucket()
data = session.upload_data("data", bucket, "data")
estimator = PyTorch(
    entry_point="train.py",
    source_dir="code",
    role=role,
    instance_type="ml.p3.8xlarge",
    instance_count=1,
    sagemaker_session=session,
    framework_version="1.12.0",
    py_version="py38",
    distribution={
        "smdistributed": {
            "modelparallel": {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4}}
        },
        "mpi": {
            "enabled": True,
            "process_per_host": 4,  # as a published notebook has it: it is one a GPU of the type
            "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none -x NCCL_DEBUG=WARN",
        },
    },
    hyperparameters={"steps": 3},
    metric_definitions=[
        {"Name": "loss", "Regex": "loss: ([0-9.]+)"},
        {"Name": "base_metric", "Regex": "<><><><><><>"},
    ],
    output_path=f"s3://sagemaker-{boto_session.region_name}-{account}/out",
    debugger_hook_config=False,
    disable_profiler=True,
    base_job_name="smp-demo",
    max_run=1200,
)
with Run("Sdk", "first", sagemaker_session=session) as run:
    run.log_parameter("rate", 0.5)
    run.log_metric("seen", 3)
    estimator.fit({"train": data}, logs="All")
name = estimator.latest_training_job.name
again = PyTorch.attach(name, sagemaker_session=session)
assert again.model_data == estimator.model_data
print("STEPS", again.hyperparameters()["steps"])
described = client.describe_training_job(TrainingJobName=name)
print("METRIC", described["FinalMetricDataList"][0]["Value"])
curve = sagemaker.TrainingJobAnalytics(name, ["loss"], session).dataframe()
print("CURVE", curve["value"].tolist())
print("LISTED", client.list_training_jobs()["TrainingJobSummaries"][0]["TrainingJobName"] == name)
rows = ExperimentAnalytics("sdk", sagemaker_session=session).dataframe().set_index("DisplayName")
job, logged = rows.loc[f"{name}-aws-training-job".lower()], rows.loc["sdk-first"]
print("JOB", job["steps"], job["loss - Max"], job["Trials"])
print("LOGGED", logged["rate"], logged["seen - Last"], logged["Experiments"])
print("RUNS", [each.run_name for each in list_runs("sdk", sagemaker_session=session)])
sagemaker.s3.S3Downloader.download(estimator.model_data, "got", sagemaker_session=session)
print("ARCHIVE", tarfile.open("got/model.tar.gz").getnames())
estimator.fit({"train": data}, wait=False)
estimator.latest_training_job.stop()
session.wait_for_job(estimator.latest_training_job.name, poll=1)

from sagemaker_core.helper import session_helper
helper = session_helper.Session()
assert (session_helper.get_execution_role(), helper.account_id()) == (role, account)

# Local mode, without an engine of containers.
local = sagemaker.LocalSession()
local.config = {"local": {"local_code": True}}
assert isinstance(session, sagemaker.LocalSession)
estimator = PyTorch(
    entry_point="lists.py",
    source_dir="code",
    role=role,
    instance_type="local",
    instance_count=1,
    sagemaker_session=local,
    framework_version="1.12.0",
    py_version="py38",
    output_path=f"file://{os.getcwd()}/out",
)
estimator.fit({"train": f"file://{os.getcwd()}/data"})
print("LOCAL", os.path.exists(estimator.model_data.removeprefix("file://")))
"""


def test_a_notebook_with_the_unmodified_sdk(tmp_path: Path) -> None:
    for name in ("code", "data", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "code/train.py").write_text(TRAINS)
    (tmp_path / "code/lists.py").write_text(LISTS)
    (tmp_path / "data/a.txt").write_text("a")
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    launch = "import sys; from smdistributed.modelparallel.launch.cli import main; sys.exit(main())"
    words = ("--jobs", str(tmp_path / "jobs"), "api", "--", sys.executable, "notebook.py")
    done = subprocess.run(
        [sys.executable, "-c", launch, *words],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The SDK colours what it shows of the log.
    assert "[0] step 2 loss: 14" in done.stdout
    assert 'files [\'a.txt\'] {"microbatches": 4, "partitions": 2}' in done.stdout
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line[:5].isupper())
    assert said["ROLE"] == "arn:aws:iam::123456789012:role/local"
    assert said["STEPS"] == "3"
    assert said["METRIC"] == "14.0"
    assert said["CURVE"] == "[10.0]"  # the mean of 6, 10 and 14, of one minute
    assert said["LISTED"] == "True"
    assert said["JOB"] == "3.0 14.0 ['Default-Run-Group-sdk']"
    assert said["LOGGED"] == "0.5 3.0 ['sdk']"
    assert said["RUNS"] == "['first']"
    assert said["ARCHIVE"] == "['weights']"
    assert "lists ['a.txt']" in done.stdout
    assert said["LOCAL"] == "True"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with server.serving(Session(root=tmp_path / "jobs")) as variables:
        yield variables


def test_what_is_wrong_is_an_error_of_the_service(service: dict[str, str]) -> None:
    client = boto3.session.Session().client("sagemaker")
    with pytest.raises(ClientError, match="Requested resource not found"):
        client.describe_training_job(TrainingJobName="other")
    with pytest.raises(ClientError, match="smp-launch does not offer StopTransformJob; it has"):
        client.stop_transform_job(TransformJobName="m")
    with pytest.raises(ClientError, match="TrainingJobName must have letters and digits"):
        client.create_training_job(
            TrainingJobName="../up",
            RoleArn="arn:aws:iam::123456789012:role/r",
            AlgorithmSpecification={"TrainingInputMode": "File"},
            OutputDataConfig={"S3OutputPath": "s3://b/a"},
            ResourceConfig={"InstanceCount": 1, "InstanceType": "ml.c5.xlarge"},
            StoppingCondition={"MaxRuntimeInSeconds": 1},
        )
    image = {"TrainingInputMode": "File", "TrainingImage": "1.dkr.ecr.r.amazonaws.com/own:1"}
    with pytest.raises(ClientError, match="images are not run here, their scripts are"):
        client.create_training_job(
            TrainingJobName="own",
            RoleArn="arn:aws:iam::123456789012:role/r",
            AlgorithmSpecification=image,
            OutputDataConfig={"S3OutputPath": "s3://b/a"},
            ResourceConfig={"InstanceCount": 1, "InstanceType": "ml.c5.xlarge"},
            StoppingCondition={"MaxRuntimeInSeconds": 1},
        )
    assert client.list_training_jobs()["TrainingJobSummaries"] == []


def test_the_environment_is_as_before_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "mine")
    before = dict(os.environ)
    with server.serving(Session(root=tmp_path)):
        assert "AWS_PROFILE" not in os.environ
    assert dict(os.environ) == before
    assert not list(tmp_path.rglob("*.yaml"))


def ask(service: dict[str, str], **changes: Any) -> int:
    """Sends a request, signed and then changed; returns the status."""
    url = service["AWS_ENDPOINT_URL"]
    body = changes.pop("body", "{}")
    headers = {"X-Amz-Target": "SageMaker.ListTrainingJobs", "Content-Type": "application/json"}
    key = changes.pop("key", service["AWS_ACCESS_KEY_ID"])
    secret = changes.pop("secret", service["AWS_SECRET_ACCESS_KEY"])
    request = AWSRequest("POST", url, data=body, headers=headers)
    SigV4Auth(Credentials(key, secret), "sagemaker", "us-east-1").add_auth(request)
    sent = {**dict(request.headers.items()), **changes.pop("headers", {})}
    sent = {name: text for name, text in sent.items() if text}
    data = changes.pop("sent_body", body).encode()
    assert not changes
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data=data, headers=sent, method="POST")
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"headers": {"Authorization": ""}}, 403),
        ({"headers": {"Authorization": "AWS4-HMAC-SHA256 nonsense"}}, 403),
        ({"key": "SMP0"}, 403),
        ({"secret": "other"}, 403),
        ({"sent_body": '{"MaxResults": 1}'}, 403),
        ({"headers": {"X-Amz-Target": "SageMaker.StopTrainingJob"}}, 403),
        ({"headers": {"X-Amz-Date": "20200101T000000Z"}}, 403),
        ({"headers": {"X-Amz-Date": "now"}}, 403),
        ({"body": "[]", "sent_body": "[]"}, 400),
    ],
)
def test_nothing_is_answered_that_is_not_signed(
    service: dict[str, str], changes: dict[str, Any], status: int
) -> None:
    assert ask(service, **dict(changes)) == status


def test_the_object_store_wants_signatures_too(service: dict[str, str]) -> None:
    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="a b/ü+?", Body=b"x" * 100)
    assert client.get_object(Bucket="bucket", Key="a b/ü+?")["Body"].read() == b"x" * 100
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{service['AWS_ENDPOINT_URL']}/bucket")
    assert error.value.code == 403
    error.value.close()
    stranger = boto3.client("s3", aws_access_key_id="a", aws_secret_access_key="b")
    with pytest.raises(ClientError, match="403"):
        stranger.list_buckets()


def test_nothing_listens_beyond_the_loopback(service: dict[str, str]) -> None:
    port = int(service["AWS_ENDPOINT_URL"].rpartition(":")[2])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                listening.append(local.partition(":")[0])
    assert listening == [f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}"]


def test_secrets_are_nowhere_in_the_folder(tmp_path: Path, service: dict[str, str]) -> None:
    assert json.dumps(service)
    for path in (tmp_path / "jobs").rglob("*"):
        if path.is_file():
            assert service["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes()


def test_models_and_endpoints_are_kept_and_forgotten(service: dict[str, str]) -> None:
    session = boto3.session.Session()
    client = session.client("sagemaker")
    container = {"Image": "x/pytorch-inference:1.12.0-cpu-py38", "ModelDataUrl": "s3://b/m.tar.gz"}
    role = "arn:aws:iam::123456789012:role/r"
    model = {"ModelName": "m", "PrimaryContainer": container, "ExecutionRoleArn": role}
    assert client.create_model(**model)["ModelArn"].endswith("model/m")
    # The SDK goes on where it reads these words.
    with pytest.raises(ClientError, match="Cannot create already existing model"):
        client.create_model(**model)
    variants = [{"VariantName": "AllTraffic", "ModelName": "m", "InitialInstanceCount": 1}]
    variants[0]["InstanceType"] = "ml.m5.xlarge"
    client.create_endpoint_config(EndpointConfigName="c", ProductionVariants=variants)
    found = client.describe_endpoint_config(EndpointConfigName="c")["ProductionVariants"]
    assert found[0]["ModelName"] == "m"
    assert client.describe_model(ModelName="m")["PrimaryContainer"] == container
    for ask in (client.describe_endpoint, client.delete_endpoint):
        with pytest.raises(ClientError, match=r"Could not find .* there is no endpoint 'e'"):
            ask(EndpointName="e")
    with pytest.raises(ClientError, match=r"\(ValidationError\).* there is no endpoint 'e'"):
        session.client("sagemaker-runtime").invoke_endpoint(EndpointName="e", Body=b"")
    client.delete_endpoint_config(EndpointConfigName="c")
    client.delete_model(ModelName="m")
    with pytest.raises(ClientError, match="Could not find"):
        client.describe_model(ModelName="m")
    assert client.list_endpoints()["Endpoints"] == []


def test_experiments_are_kept_and_forgotten(service: dict[str, str]) -> None:
    client = boto3.session.Session().client("sagemaker")
    with pytest.raises(ClientError, match=r"\(ResourceNotFound\).* no experiment '\.\./up'"):
        client.describe_experiment(ExperimentName="../up")
    client.create_experiment(ExperimentName="e", Tags=[{"Key": "k", "Value": "v"}])
    for name in ("one", "two", "three"):
        client.create_trial(TrialName=name, ExperimentName="e")
    client.create_trial_component(
        TrialComponentName="c", Parameters={"a": {"NumberValue": 1}, "b": {"StringValue": "x"}}
    )
    client.update_trial_component(
        TrialComponentName="c", DisplayName="C", ParametersToRemove=["b", "none"]
    )
    found = client.describe_trial_component(TrialComponentName="c")
    assert (found["DisplayName"], found["Parameters"]) == ("C", {"a": {"NumberValue": 1.0}})
    client.associate_trial_component(TrialName="two", TrialComponentName="c")
    (only,) = client.list_trials(TrialComponentName="c")["TrialSummaries"]
    assert only["TrialName"] == "two"
    pages = client.get_paginator("list_trials").paginate(
        ExperimentName="e", SortBy="Name", SortOrder="Ascending", PaginationConfig={"PageSize": 2}
    )
    names = [[each["TrialName"] for each in page["TrialSummaries"]] for page in pages]
    assert names == [["one", "three"], ["two"]]
    with pytest.raises(ClientError, match="no experiment 'E'; those there are: e"):
        client.list_trials(ExperimentName="E")
    arn = client.describe_experiment(ExperimentName="e")["ExperimentArn"]
    assert client.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "k", "Value": "v"}]

    def search(*filters: tuple[str, str, str], how: str = "And") -> int:
        asked = [dict(zip(("Name", "Operator", "Value"), each, strict=True)) for each in filters]
        expression = {"Filters": asked, "Operator": how}
        found = client.search(Resource="ExperimentTrialComponent", SearchExpression=expression)
        return len(found["Results"])

    of_e, large = ("Parents.ExperimentName", "Equals", "e"), ("Parameters.a", "GreaterThan", "1")
    assert (search(of_e), search(large), search(of_e, large)) == (1, 0, 0)
    assert search(of_e, large, how="Or") == 1
    with pytest.raises(ClientError, match=r"a search for 'Metrics\.x' is not offered"):
        search(("Metrics.x", "GreaterThan", "0"))
    with pytest.raises(ClientError, match="a search for Pipeline is not offered, but for Exper"):
        client.search(Resource="Pipeline")
    with pytest.raises(ClientError, match="trial 'two' has c: delete these"):
        client.delete_trial(TrialName="two")
    client.disassociate_trial_component(TrialName="two", TrialComponentName="c")
    client.delete_trial_component(TrialComponentName="c")
    for name in ("one", "two", "three"):
        client.delete_trial(TrialName=name)
    client.delete_experiment(ExperimentName="e")
    assert client.list_experiments()["ExperimentSummaries"] == []


def test_what_a_model_refuses_is_an_error_of_the_model(
    service: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ModelError(415, "planted")

    monkeypatch.setattr(Serving, "invoke", refuse)
    with pytest.raises(ClientError, match="planted") as error:
        boto3.client("sagemaker-runtime").invoke_endpoint(EndpointName="e", Body=b"")
    assert error.value.response["Error"]["Code"] == "ModelError"
    assert error.value.response["OriginalStatusCode"] == 415
