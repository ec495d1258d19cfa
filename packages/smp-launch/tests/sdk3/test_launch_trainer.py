"""Version 3 of the unmodified SDK as a client of the interface on the loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[4] / "docs/tests"))
import snippets

PAGE = Path(__file__).parents[4] / "docs/howto/model-trainer.md"
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(240)]

LAUNCH = "import sys; from smdistributed.modelparallel.launch.cli import main; sys.exit(main())"
PIPELINE = """
import torch
import smdistributed.modelparallel.torch as smp

smp.init()
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4) for _ in range(4)]
model = smp.DistributedModel(torch.nn.Sequential(*layers))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def step(model, inputs):
    loss = (model(inputs) ** 2).mean()
    model.backward(loss)
    return loss

for _ in range(2):
    optimizer.zero_grad()
    outputs = step(model, torch.ones(4, 4))
    loss = outputs.reduce_mean()
    optimizer.step()
if smp.rank() == 0:
    print(f"pp {smp.pp_size()} outputs {len(outputs.outputs)} loss {loss.item():.6f}")
"""
ALONE = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = (model(torch.ones(4, 4)) ** 2).mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
"""
TELLS = """
import json, os, pathlib, sys
seen = {"argv": sys.argv[1:], "environ": dict(os.environ), "cwd": sorted(os.listdir())}
pathlib.Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps(seen))
"""
RANKS = """
import os, pathlib, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
if world.rank == 0:
    print("ranks", world.size, "sum", total, "word", os.environ["WORD"], sys.argv[1:])
    pathlib.Path("beside").write_text("written")
    pathlib.Path("/opt/ml/checkpoints/first").write_text("kept")
"""
FAILS = """
import smdistributed.modelparallel.torch as smp
smp.init()
raise ValueError("planted")
"""
DRIVER = """
import json, os
told = json.loads(os.environ["SM_DISTRIBUTED_CONFIG"])
print("own driver", told["word"], os.environ["SM_ENTRY_SCRIPT"])
"""
PROGRAM = """
import json, logging, os, sys
from typing import ClassVar
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from botocore.exceptions import ClientError
from sagemaker.core.resources import TrainingJob
from sagemaker.core.utils.exceptions import FailedStatusError
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import CheckpointConfig, Compute, InputData, SourceCode
from sagemaker.train.distributed import MPI, SMP, DistributedConfig, Torchrun
from sagemaker.train.model_trainer import Mode

IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.2.0-gpu-py310"
jobs = {}

# Local mode, without an engine of containers.
local = ModelTrainer(
    training_mode=Mode.LOCAL_CONTAINER,
    training_image=IMAGE,
    base_job_name="local",
    source_code=SourceCode(source_dir="code", entry_script="sub/tells.py"),
    compute=Compute(instance_type="local_cpu", instance_count=1),
    local_container_root=os.path.abspath("container"),
)
local.train(input_data_config=[InputData(channel_name="train", data_source="data")])
print("LOCAL", *map(os.listdir, ("container/artifacts/model", "container/compressed_artifacts")))

def start(word, source, **given):
    channels = given.pop("channels", [])
    trainer = ModelTrainer(
        training_image=IMAGE,
        base_job_name=word,
        source_code=SourceCode(**{"source_dir": "code", **source}),
        compute=Compute(instance_type="ml.p3.16xlarge", instance_count=given.pop("hosts", 1)),
        **given,
    )
    trainer.train(input_data_config=channels, wait=False, logs=False)
    jobs[word] = trainer._latest_training_job

class Own(DistributedConfig):
    word: str
    driver_dir: ClassVar = os.path.abspath("driver")
    driver_script: ClassVar = "own_driver.py"

start(
    "pipeline",
    {"entry_script": "pipeline.py"},
    distributed=Torchrun(process_count_per_node=2, smp=SMP(tensor_parallel_degree=1)),
    hyperparameters={"d": "begins like an option of torchrun"},
    environment={"SM_HP_MP_PARAMETERS": '{"pipeline_parallel_degree": 2, "microbatches": 2}'},
)
start(
    "ranks",
    {"entry_script": "ranks.py", "requirements": "needs/list.txt"},
    role="arn:aws:iam::123456789012:role/service-role/mine",
    distributed=MPI(process_count_per_node=2, mpi_additional_options=["-x", "WORD=a b"]),
    checkpoint_config=CheckpointConfig(s3_uri="s3://smp-launch/kept"),
    hyperparameters={"steps": 3},
    hosts=2,
)
start(
    "tells",
    {"entry_script": "sub/tells.py"},
    hyperparameters={"lr": 1e-3, "name": "x y", "flag": True, "nested-one": {"a": [1]}, "z": None},
    channels=[InputData(channel_name="train", data_source="data")],
)
start(
    "command",
    {"source_dir": "code.tar.gz", "command": "test -d sub && echo", "args": ["of a", "command"]},
)
start("own", {"entry_script": "ranks.py"}, distributed=Own(word="told"))
start("fails", {"entry_script": "fails.py"}, distributed=Torchrun(process_count_per_node=1))
try:
    start("refused", {"entry_script": "ranks.py"}, distributed=Torchrun(smp=SMP(random_seed=1)))
except ClientError as error:
    print("REFUSED", error)
try:
    start(
        "world",
        {"entry_script": "ranks.py"},
        distributed=Torchrun(process_count_per_node=3, smp=SMP(tensor_parallel_degree=2)),
    )
except ClientError as error:
    print("WORLD", str(error).replace("\\n", " "))
try:
    jobs["fails"].wait(poll=1)
except FailedStatusError as error:
    print("FAILED", str(error).replace("\\n", " "))
del jobs["fails"]
for word, job in jobs.items():
    job.wait(poll=1, logs=True)
    again = TrainingJob.get(job.training_job_name)
    print("JOB", json.dumps([word, again.training_job_name, again.hyper_parameters]))
again = TrainingJob.get(jobs["tells"].training_job_name)
print("ARTIFACT", again.model_artifacts.s3_model_artifacts)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the program has run."""
    place = tmp_path_factory.mktemp("sdk3")
    for name in ("code/sub", "code/needs", "data", "driver", "home", "container"):
        (place / name).mkdir(parents=True)
    files = {
        "code/pipeline.py": PIPELINE,
        "code/ranks.py": RANKS,
        "code/fails.py": FAILS,
        "code/sub/tells.py": TELLS,
        "code/needs/list.txt": "mpi4py",
        "data/a.txt": "a",
        "driver/own_driver.py": DRIVER,
        "alone.py": ALONE,
        "program.py": PROGRAM,
    }
    for name, text in files.items():
        (place / name).write_text(text)
    with tarfile.open(place / "code.tar.gz", "w:gz") as archive:
        archive.add(place / "code", ".")
    return place


@pytest.fixture(scope="module")
def said(place: Path) -> str:
    """What the program prints."""
    return run(place, "-c", LAUNCH, "--jobs", "jobs", "api", "--", sys.executable, "program.py")


def run(place: Path, *words: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=place,
        env={**os.environ, "HOME": str(place / "home"), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def marked(said: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in said.splitlines() if line[:3].isupper())


def folder_of(place: Path, word: str) -> Path:
    (found,) = (place / "jobs").glob(f"{word}-*")
    return found


def test_scripts_are_started_by_what_starts_jobs_here(place: Path, said: str) -> None:
    alone = run(place, "alone.py").strip()
    assert f"pp 2 outputs 2 {alone}" in said
    assert "[0] ranks 4 sum 6 word a b ['--steps', '3']" in said
    assert (place / "jobs/s3/smp-launch/kept/first").read_text() == "kept"
    # The script wrote beside itself, and not into what was uploaded.
    assert (folder_of(place, "ranks") / "input/data/code/beside").exists()
    assert not list((place / "jobs/s3").rglob("beside"))
    assert "of a command" in said
    assert "own driver told ranks.py" in said
    words = marked(said)["LOCAL"]
    assert words.startswith("['seen.json'] ")
    assert "'model.tar.gz'" in words


def test_what_is_wrong_is_said_before_or_after(said: str) -> None:
    words = marked(said)
    assert "SMP.random_seed=1 is not offered: call torch.manual_seed" in words["REFUSED"]
    assert "tensor_parallel_degree" in words["WORLD"]
    assert "start 2 or 4 processes" in words["WORLD"]
    assert "AlgorithmError: algo-1: rank 0: ValueError: planted" in words["FAILED"]


def test_jobs_are_found_again_with_their_results(place: Path, said: str) -> None:
    found = [json.loads(line[4:]) for line in said.splitlines() if line.startswith("JOB ")]
    values = {word: values for word, _, values in found}
    assert list(values) == ["pipeline", "ranks", "tells", "command", "own"]
    assert values["ranks"] == {"steps": "3"}
    artifact = marked(said)["ARTIFACT"]
    assert artifact.startswith("s3://smp-launch/tells/")
    path = place / "jobs/s3" / artifact.removeprefix("s3://")
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["seen.json"]


@pytest.mark.usefixtures("said")
def test_a_script_sees_what_the_containers_programs_would_show(place: Path) -> None:
    """The judge is the SDK's own programs, given the same folder."""
    folder = folder_of(place, "tells")
    seen: dict[str, Any] = json.loads((folder / "model/seen.json").read_text())
    programs = place / "programs"
    shutil.copytree(folder / "input/data/sm_drivers", programs)
    for path in programs.rglob("*.py"):
        path.write_text(path.read_text().replace("/opt/ml", str(folder)))
    run(place, str(programs / "scripts/environment.py"), TRAINING_JOB_NAME=folder.name)
    shows = "import json, os; print(json.dumps(dict(os.environ)))"
    sourced = f"set -a; . {folder}/input/sm_training.env; exec {sys.executable} -c '{shows}'"
    text = subprocess.run(["/bin/bash", "-c", sourced], capture_output=True, check=True).stdout
    judged = {name: word for name, word in json.loads(text).items() if name.startswith("SM_")}
    differing = {
        name for name in judged if parsed(judged[name]) != parsed(seen["environ"].get(name))
    }
    # Documented: an address that leads here; all that other jobs are shown too.
    assert differing <= {"SM_MASTER_ADDR", "SM_MASTER_PORT", "SM_TRAINING_ENV"}
    asks = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import basic_script_driver as b; "
        "print(json.dumps(b.create_commands()))"
    )
    words = run(place, "-c", asks, str(programs / "distributed_drivers"), **judged)
    assert json.loads(words)[2:] == seen["argv"]
    assert {"fails.py", "ranks.py", "sub"} <= set(seen["cwd"])


def test_the_page_trains_by_the_sdk_as_by_its_names(tmp_path: Path) -> None:
    """Its run by our names is one of the documentation's own tests."""
    snippets.write_files(PAGE, tmp_path)
    (tmp_path / "home").mkdir()
    (output,) = [block.text for block in snippets.blocks_of(PAGE) if block.kind == "output"]
    shown = [line for line in output.splitlines() if line.startswith("step ")]
    said = run(tmp_path, "-c", LAUNCH, "--jobs", "jobs", "api", "--", sys.executable, "launch.py")
    (job,) = (tmp_path / "jobs").glob("pytorch-training-job-*")
    log = (job / "logs/algo-1.log").read_text().splitlines()
    assert [line for line in log if line.startswith("step ")] == shown
    assert "model in s3://smp-launch/pytorch-training-job/" in said


def parsed(text: str | None) -> Any:
    """Returns a value, whatever the blanks and the order of its JSON; None and nothing are one."""
    try:
        value = json.loads(text or "null")
    except ValueError:
        return text
    return sorted(value) if isinstance(value, list) else value
