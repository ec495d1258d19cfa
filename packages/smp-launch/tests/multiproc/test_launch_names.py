"""What is written for the service's SDK runs as it is, where its names mean this package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

TRAINS = """
import os
print("loss: 0.5", os.listdir(os.environ["SM_CHANNEL_TRAIN"]), os.environ["SM_MODULE_DIR"])
open(os.path.join(os.environ["SM_MODEL_DIR"], "weights"), "w").write("w")
"""
#: As a notebook has it.
NOTEBOOK = """
import sagemaker
from sagemaker.pytorch import PyTorch
from sagemaker.debugger import DebuggerHookConfig, ProfilerRule, Rule, rule_configs
from sagemaker.utils import name_from_base, sagemaker_timestamp
from sagemaker.s3 import S3Downloader
from sagemaker.analytics import ExperimentAnalytics
from sagemaker.experiments.run import Run, list_runs, load_run
from sagemaker.pytorch.model import PyTorchModel
from smexperiments.experiment import Experiment
from smexperiments.tracker import Tracker
from smexperiments.trial import Trial

session = sagemaker.Session()
role = sagemaker.get_execution_role()
bucket = session.default_bucket()
assert session.boto_session.region_name == session.boto_region_name
data = session.upload_data("data", bucket=bucket, key_prefix="demo")
estimator = PyTorch(
    entry_point="train.py",
    role=role,
    instance_count=1,
    instance_type="ml.p3.16xlarge",
    sagemaker_session=session,
    framework_version="1.8.1",
    py_version="py36",
    debugger_hook_config=False,
    output_path=f"s3://{bucket}/out",
    rules=[Rule.sagemaker(rule_configs.overfit())],
    metric_definitions=[
        {"Name": "loss", "Regex": "loss: ([0-9.]+)"},
        {"Name": "base_metric", "Regex": "<><><><><><>"},
    ],
    distribution={"mpi": {"enabled": False}},
)
with Run("Names", "first", sagemaker_session=session) as run:
    run.log_parameter("rate", 0.5)
    load_run().log_metric("seen", 3)
    estimator.fit({"train": sagemaker.inputs.TrainingInput(data)})
name = estimator.latest_training_job.name
assert name == estimator._current_job_name
assert "pytorch-training:1.8.1" in estimator.training_image_uri()
again = PyTorch.attach(name)
assert again.model_data == estimator.model_data == f"s3://{bucket}/out/{name}/output/model.tar.gz"
experiment = Experiment.load("names")
with Tracker.create(display_name="Data") as tracker:
    tracker.log_parameters({"kind": "letters"})
    tracker.log_input("set", data)
trial = Trial.create("second", experiment.experiment_name)
trial.add_trial_component(tracker)
rows = {row["DisplayName"]: row for row in ExperimentAnalytics("names").rows()}
job = rows[f"{name}-aws-training-job".lower()]
print("JOB", job["loss - Last"], job["train - Value"] == data, job["Trials"])
print("RUN", rows["names-first"]["rate"], rows["names-first"]["seen - Last"])
print("DATA", rows["Data"]["kind"], rows["Data"]["set - Value"] == data, rows["Data"]["Trials"])
print("RUNS", [each.run_name for each in list_runs("names")])
for word, wrong in {
    "UNKNOWN": lambda: estimator.fit(experiment_config={"ExperimentName": "none"}),
    "TWICE": lambda: Trial.create("second", "names"),
    "HELD": experiment.delete,
}.items():
    try:
        wrong()
    except Exception as error:
        print(word, error)
experiment.delete_all("--force")
print("LEFT", list(Experiment.list()))
print("GOT", S3Downloader.download(again.model_data, "got"), S3Downloader.list(f"s3://{bucket}/out"))
print("METRICS", sagemaker.TrainingJobAnalytics(name, ["loss"]).rows())
DebuggerHookConfig(s3_output_path="s3://x")
(rule,) = estimator.latest_training_job.describe()["DebugRuleEvaluationStatuses"]
assert estimator.latest_training_job.rule_job_summary() == [rule]
print("RULE", rule["RuleConfigurationName"], rule["RuleEvaluationStatus"])
try:
    sagemaker.tuner.HyperparameterTuner(estimator)
except NotImplementedError as error:
    print("TUNER", error)
try:
    import sagemaker.pipeline
except ModuleNotFoundError as error:
    print("PIPELINE", error)
"""

RANKS = """
import os, pathlib, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
if world.rank == 0:
    print("ranks", world.size, "sum", total, sys.argv[1:], os.environ["SM_HP_MP_PARAMETERS"])
    pathlib.Path("beside").touch()
    pathlib.Path(os.environ["SM_MODEL_DIR"], "weights").touch()
"""
#: As a notebook for version 3 of the SDK has it.
TRAINER = """
from sagemaker.core import image_uris
from sagemaker.core.helper.session_helper import Session, get_execution_role
from sagemaker.core.resources import TrainingJob
from sagemaker.core.utils.exceptions import FailedStatusError
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import CheckpointConfig, Compute, InputData, SourceCode
from sagemaker.train.distributed import MPI, SMP, DistributedConfig, Torchrun

image = image_uris.retrieve(framework="pytorch", version="2.13.0", instance_type="ml.p3.16xlarge")
trainer = ModelTrainer(
    sagemaker_session=Session(),
    role=get_execution_role(),
    training_image=image,
    source_code=SourceCode(source_dir="code", entry_script="ranks.py"),
    compute=Compute(instance_type="ml.p3.16xlarge", instance_count=2),
    distributed=MPI(process_count_per_node=1),
    checkpoint_config=CheckpointConfig(),
    hyperparameters={"steps": 3, "mp_parameters": {"pipeline_parallel_degree": 2}},
)
trainer.train(input_data_config=[InputData(channel_name="train", data_source="data")])
job = TrainingJob.get(trainer._latest_training_job.training_job_name)
print("JOB", job.training_job_status, job.model_artifacts.s3_model_artifacts)
print("OUTPUT", trainer.output_data)
command = SourceCode(source_dir="code", command="python -c", args=["print('a command')"])
ModelTrainer(source_code=command).train()
command = SourceCode(command="false")
trainer = ModelTrainer(source_code=command)
trainer.train(wait=False)
try:
    trainer._latest_training_job.wait(timeout=60)
except FailedStatusError as error:
    print("FAILED", error)
source = SourceCode(source_dir="code", entry_script="ranks.py")
for word, make in {
    "SMP": lambda: ModelTrainer(
        source_code=source, distributed=Torchrun(smp=SMP(allow_empty_shards=True))
    ).train(),
    "NAME": lambda: SourceCode(entry="ranks.py"),
    "FILE": lambda: ModelTrainer(source_code=SourceCode(source_dir="code", entry_script="x.py")),
    "NONE": lambda: ModelTrainer(training_image=image),
    "RECIPE": lambda: ModelTrainer.from_recipe("recipe"),
}.items():
    try:
        make()
    except Exception as error:
        print(word, error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").touch()
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    left_out = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    environ = {name: text for name, text in os.environ.items() if name not in left_out}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environ, "SMP_JOBS": str(folder / "jobs"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_notebook_for_the_sdk_runs_as_it_is(folder: Path) -> None:
    launch = "import sys; from smdistributed.modelparallel.launch.cli import main; sys.exit(main())"
    done = run(folder, "-c", launch, "run", "notebook.py")
    assert done.returncode == 0, done.stderr
    assert "smp-launch: sagemaker names this machine in this process" in done.stderr
    assert re.search(
        r"loss: 0\.5 \['a\.txt'\] s3://smp-launch/pytorch-\S+/source/sourcedir\.tar\.gz\n",
        done.stdout,
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line[:3].isupper())
    assert said["GOT"].startswith("['got/model.tar.gz']")
    assert said["RULE"] == "Overfit Stopped"
    assert said["JOB"] == "0.5 True ['Default-Run-Group-names']"
    assert said["RUN"] == "0.5 3.0"
    assert said["DATA"] == "letters True ['second']"
    assert said["RUNS"] == "['first']"
    assert said["UNKNOWN"] == "there is no experiment 'none'; those there are: names."
    assert said["TWICE"].startswith("each trial has a name of its own; 'second' already exists")
    assert "experiment 'names' has Default-Run-Group-names, second: delete" in said["HELD"]
    assert said["LEFT"] == "[]"
    assert "'metric_name': 'loss', 'value': 0.5" in said["METRICS"]
    assert (
        said["TUNER"] == "sagemaker.tuner.HyperparameterTuner is not offered: call fit in a loop."
    )
    assert said["PIPELINE"].startswith("smp-launch has no sagemaker.pipeline; it has sagemaker,")
    done = run(folder, "-c", launch, "run", "notebook.ipynb")
    assert done.returncode == 2
    assert "what is run is a Python file or a notebook; got notebook.ipynb" in done.stderr


def test_a_notebook_for_version_3_of_the_sdk_runs_as_it_is(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "code/ranks.py").write_text(RANKS)
    (folder / "trainer.py").write_text(TRAINER)
    launch = "import sys; from smdistributed.modelparallel.launch.cli import main; sys.exit(main())"
    done = run(folder, "-c", launch, "run", "trainer.py")
    assert done.returncode == 0, done.stderr
    words = "ranks 2 sum 1 ['--steps', '3', '--mp_parameters', '{\"pipeline_parallel_degree\": 2}']"
    assert f'{words} {{"pipeline_parallel_degree": 2}}' in done.stdout
    # The script wrote beside itself, and not into what was uploaded.
    assert not list((folder / "jobs/s3").rglob("beside"))
    assert "\na command\n" in done.stdout
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line[:3].isupper())
    state, archive = said["JOB"].split()
    assert state == "Completed"
    assert archive.startswith("s3://smp-launch/pytorch-training-job/pytorch-training-job-")
    assert said["OUTPUT"] == archive.replace("model.tar.gz", "output.tar.gz")
    assert "failed: AlgorithmError: algo-1: exit code 1" in said["FAILED"]
    assert said["SMP"].startswith("SMP.allow_empty_shards=True is not offered: parameters ")
    assert said["NAME"] == "SourceCode.entry is not a known parameter."
    assert "SourceCode: x.py must be a file in source_dir; there is none at" in said["FILE"]
    assert said["NONE"].startswith("ModelTrainer needs source_code, a SourceCode")
    assert said["RECIPE"] == "ModelTrainer.from_recipe is not offered: give source_code."


def test_the_names_are_of_one_process_and_the_first_to_come(folder: Path) -> None:
    (folder / "sagemaker.py").write_text("word = 'another'\n")
    program = """
import sys
from smdistributed.modelparallel import launch
if "first" in sys.argv:
    import sagemaker
launch.load_ipython_extension(None)
launch.load_ipython_extension(None)
import sagemaker
print(sagemaker.Session.__module__, hasattr(sagemaker, "word"))
"""
    (folder / "program.py").write_text(program)
    done = run(folder, "program.py")
    assert done.stdout == "smdistributed.modelparallel.launch.session False\n", done.stderr
    assert done.stderr.count("smp-launch:") == 1
    done = run(folder, "program.py", "first")
    assert "sagemaker is imported already, from " in done.stderr
    assert "sagemaker.py: start a new process" in done.stderr
