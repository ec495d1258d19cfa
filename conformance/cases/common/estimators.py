"""Estimators: what a notebook gives them, what a script sees, and what becomes of results."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import Adapter
from conformance.registry import case, later
from conformance.worlds import FRAMEWORKS
from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.estimator import Estimator, EstimatorBase
from smdistributed.modelparallel.launch.exceptions import (
    StorageError,
    UnexpectedStatusException,
    UnknownJobError,
)
from smdistributed.modelparallel.launch.inputs import TrainingInput
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import LocalSession, Session
from smdistributed.modelparallel.launch.tensorflow import TensorFlow

NEW = ("new",)
_ESTIMATORS: dict[str, type[EstimatorBase]] = {"torch": PyTorch, "tensorflow": TensorFlow}
_SEES = """
import json, os, sys
place = os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"] + ".json")
json.dump({"argv": sys.argv[1:], "environ": dict(os.environ)}, open(place, "w"))
open(os.path.join(os.environ["SM_MODEL_DIR"], "weights"), "w").write("w")
print("loss: 0.25")
"""
_STARTS = """
import os, smdistributed.modelparallel.{framework} as smp
smp.init({{"microbatches": 2}})
print("size", smp.size(), smp.pp_size(), os.environ["SHOWN"], os.environ["FI_PROVIDER"])
"""


class Bench:
    """A folder with a script, and estimators that run it."""

    def __init__(self, framework: str, root: Path) -> None:
        self.framework = framework
        self.root = root
        self.session = Session(root=root / "jobs")

    def make(self, script: str = _SEES, **given: Any) -> Any:
        """Returns an estimator of the framework, and of a script."""
        folder = self.root / "code"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        base = {"entry_point": "train.py", "source_dir": str(folder), "role": "role"}
        kind: Any = _ESTIMATORS[self.framework]
        return kind(**{**base, "sagemaker_session": self.session, **given})

    def run(self, script: str = _SEES, inputs: Any = None, **given: Any) -> Any:
        """Runs a job to its end; returns its estimator."""
        estimator = self.make(script, **given)
        with contextlib.redirect_stdout(io.StringIO()):
            estimator.fit(inputs)
        return estimator

    def folder(self, estimator: Any) -> Path:
        """Returns the folder of the latest job."""
        return self.session.root / str(estimator.latest_training_job.name)

    def seen(self, estimator: Any, host: str = "algo-1") -> Any:
        """Returns what the script saw on a host."""
        return json.loads((self.folder(estimator) / f"output/data/{host}.json").read_text())

    def log(self, estimator: Any) -> str:
        """Returns what the job printed."""
        return (self.folder(estimator) / "logs/algo-1.log").read_text()

    def data(self) -> Path:
        """Returns a folder with two files."""
        folder = self.root / "data"
        (folder / "deep").mkdir(parents=True)
        (folder / "a.txt").write_text("a")
        (folder / "deep/b.txt").write_text("b")
        return folder


@contextlib.contextmanager
def bench(adapter: Adapter) -> Iterator[Bench]:
    """Makes a place for jobs."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        yield Bench(adapter.name, Path(folder))


@case(
    "launch.estimators.script",
    "launch.estimators.code_folder",
    "launch.estimators.extra_code",
    "launch.what_the_script_sees.guard",
    worlds=NEW,
)
def a_script_is_run_with_what_it_imports(adapter: Adapter) -> None:
    with bench(adapter) as place:
        (place.root / "tools").mkdir()
        (place.root / "tools/__init__.py").write_text("word = 'imported'")
        (place.root / "code").mkdir()
        (place.root / "code/beside.py").write_text("word = 'beside'")
        script = "import beside, tools\nif __name__ == '__main__': print(beside.word, tools.word)"
        job = place.run(script, dependencies=[str(place.root / "tools")])
        assert "beside imported" in place.log(job)
        with pytest.raises(ConfigError, match="there is none at /"):
            place.run(entry_point="missing.py")
        with pytest.raises(ConfigError, match="inside source_dir"):
            place.run(entry_point="../tools/__init__.py")


@case(
    "launch.estimators.arguments",
    "launch.what_the_script_sees.arguments",
    "launch.what_the_script_sees.argument_names",
    "launch.what_the_script_sees.config_files",
    "launch.estimators.tensorflow_results",
    worlds=NEW,
)
def hyperparameters_are_arguments_and_variables(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job = place.run(hyperparameters={"epochs": 2, "on": True, "name": "a b"})
        seen = place.seen(job)
        words = ["--epochs", "2", "--name", "a b", "--on", "True"]
        if adapter.name == "tensorflow":
            words[2:2] = ["--model_dir", str(place.folder(job) / "model")]
        assert seen["argv"] == words
        environ = seen["environ"]
        assert json.loads(environ["SM_HPS"])["name"] == "a b"
        assert (environ["SM_HP_EPOCHS"], environ["SM_HP_ON"]) == ("2", "true")
        assert json.loads(environ["SM_USER_ARGS"]) == words
        config = Path(environ["SM_INPUT_CONFIG_DIR"])
        assert json.loads((config / "hyperparameters.json").read_text())["epochs"] == "2"
        assert json.loads((config / "resourceconfig.json").read_text())["hosts"] == ["algo-1"]
        assert json.loads((config / "inputdataconfig.json").read_text()) == {}


@case(
    "launch.what_the_script_sees.model_folder",
    "launch.what_the_script_sees.output_folder",
    "launch.what_the_script_sees.data_folders",
    "launch.what_the_script_sees.devices",
    "launch.what_the_script_sees.rest",
    "launch.estimators.input",
    "launch.fit.inputs",
    "launch.data_file.file_mode",
    "launch.data_file.channel_object",
    worlds=NEW,
)
def folders_and_channels_are_there(adapter: Adapter) -> None:
    with bench(adapter) as place:
        data = str(place.data())
        job = place.run(inputs={"train": f"file://{data}", "eval": TrainingInput(f"{data}/deep")})
        environ, folder = place.seen(job)["environ"], place.folder(job)
        assert environ["SM_MODEL_DIR"] == str(folder / "model")
        assert environ["SM_OUTPUT_DATA_DIR"] == str(folder / "output/data")
        assert json.loads(environ["SM_CHANNELS"]) == ["eval", "train"]
        assert Path(environ["SM_CHANNEL_TRAIN"], "deep/b.txt").read_text() == "b"
        assert os.listdir(environ["SM_CHANNEL_EVAL"]) == ["b.txt"]
        assert int(environ["SM_NUM_CPUS"]) >= 1
        assert int(environ["SM_NUM_GPUS"]) >= 0
        for name in ("SM_INPUT_DIR", "SM_OUTPUT_DIR", "SM_INPUT_CONFIG_DIR"):
            assert Path(environ[name]).is_dir()
        assert json.loads(environ["SM_TRAINING_ENV"])["job_name"] == folder.name
        assert environ["SM_MODULE_NAME"] == "train"
        alone = place.run(inputs=data)
        assert "SM_CHANNEL_TRAINING" in place.seen(alone)["environ"]
        with pytest.raises(StorageError, match="channel train: there is nothing at"):
            place.run(inputs={"train": "/nowhere"})
        with pytest.raises(ConfigError, match="Pip"):
            place.run(input_mode="Pip")


@case(
    "launch.estimators.hosts",
    "launch.estimators.host_type",
    "launch.what_the_script_sees.hosts",
    worlds=NEW,
)
def hosts_are_parts_of_this_machine(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job = place.run(instance_count=2, instance_type="ml.p3.16xlarge")
        for host in ("algo-1", "algo-2"):
            environ = place.seen(job, host)["environ"]
            assert environ["SM_CURRENT_HOST"] == host
            assert json.loads(environ["SM_HOSTS"]) == ["algo-1", "algo-2"]
        with pytest.raises(ConfigError, match="at least 1"):
            place.make(instance_count=0)
        with pytest.raises(ConfigError, match="must be 'local'"):
            place.make(instance_type="laptop")


@case(
    "launch.results.model_artifact",
    "launch.results.output_files",
    "launch.results.only_rank_0_writes",
    "launch.estimators.result_place",
    "launch.fit.job_object",
    worlds=NEW,
)
def results_are_archives(adapter: Adapter) -> None:
    with bench(adapter) as place:
        out = place.root / "out"
        job = place.run(output_path=f"file://{out}")
        name = job.latest_training_job.name
        assert job.model_data == f"file://{out}/{name}/output/model.tar.gz"
        for archive, member in (("model.tar.gz", "weights"), ("output.tar.gz", "algo-1.json")):
            with tarfile.open(out / name / "output" / archive) as opened:
                assert opened.getnames() == [member]
        with pytest.raises(Exception, match="there is no job yet"):
            print(place.make().model_data)


@case(
    "launch.fit.blocking",
    "launch.fit.attach",
    "launch.fit.name",
    "launch.fit.states",
    "launch.estimators.name",
    worlds=NEW,
)
def a_job_goes_on_and_is_attached_to(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job = place.make("print('done')", base_job_name="demo", hyperparameters={"lr": 0.5})
        job.fit(wait=False)
        name = job.latest_training_job.name
        assert name.startswith("demo-")
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            again = type(job).attach(name, place.session)
        assert again.latest_training_job.describe()["TrainingJobStatus"] == "Completed"
        assert again.hyperparameters()["lr"] == 0.5
        with pytest.raises(UnknownJobError, match=name):
            type(job).attach("other", place.session)
        other = TensorFlow if isinstance(job, PyTorch) else PyTorch
        with pytest.raises(ValueError, match="attach takes jobs of"):
            other.attach(name, place.session)
        with pytest.raises(ConfigError, match=f"there is a job {name}"):
            job.fit(job_name=name)


@case("launch.fit.start", "launch.fit.log_display", worlds=NEW)
def the_log_is_shown_and_a_failure_raised(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job = place.make("print('in the log'); raise ValueError('planted')")
        for logs in (True, False):
            shown = io.StringIO()
            with (
                contextlib.redirect_stdout(shown),
                pytest.raises(UnexpectedStatusException, match=r"algo-1: ValueError: planted"),
            ):
                job.fit(logs=logs)
            assert ("in the log" in shown.getvalue()) is logs
        assert "planted" in (place.folder(job) / "output/failure").read_text()


@case("launch.estimators.time", worlds=NEW)
def time_is_limited(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job = place.run("import time; time.sleep(60)", max_run=1)
        assert job.latest_training_job.describe()["TrainingJobStatus"] == "Stopped"
        assert place.make(train_max_run=5).max_run == 5


@case("launch.estimators.resume", "launch.results.checkpoints", worlds=NEW)
def checkpoints_are_restored(adapter: Adapter) -> None:
    script = """
import os, sys
path = os.path.join(sys.argv[sys.argv.index("--to") + 1], "step")
print("found", open(path).read() if os.path.exists(path) else "nothing")
open(path, "w").write("1")
"""
    with bench(adapter) as place:
        kept = {"checkpoint_s3_uri": "s3://bucket/run", "checkpoint_local_path": "/opt/ml/kept"}
        for found in ("nothing", "1"):
            job = place.run(script, hyperparameters={"to": "/opt/ml/kept"}, **kept)
            assert f"found {found}" in place.log(job)


@case(
    "launch.estimators.disk",
    "launch.estimators.encryption",
    "launch.estimators.debugger",
    "launch.estimators.metrics_tags_networks",
    worlds=NEW,
)
def arguments_of_the_service_are_accepted(adapter: Adapter) -> None:
    given = {
        "train_volume_size": 30,
        "output_kms_key": "key",
        "debugger_hook_config": object(),
        "disable_profiler": True,
        "subnets": ["a"],
        "security_group_ids": ["b"],
    }
    with bench(adapter) as place:
        with pytest.warns(ConfigWarning) as caught:
            place.make(**given)
        assert [str(each.message) for each in caught] == [
            f"no effect here: {', '.join(sorted(given))}."
        ]
        place.make(debugger_hook_config=False)
        metrics = [{"Name": "loss", "Regex": "loss: ([0-9.]+)"}]
        job = place.run(metric_definitions=metrics, tags=[{"Key": "a", "Value": "b"}])
        found = job.latest_training_job.describe()
        assert found["FinalMetricDataList"][0]["Value"] == 0.25
        assert found["Tags"] == [{"Key": "a", "Value": "b"}]


@case("launch.estimators.session", "launch.estimators.identity", worlds=NEW)
def any_session_and_role_will_do(adapter: Adapter) -> None:
    with bench(adapter) as place:
        os.environ["SMP_JOBS"] = str(place.root / "elsewhere")
        assert place.make(sagemaker_session=object(), role=None).sagemaker_session.root == Path(
            os.environ["SMP_JOBS"]
        )
        chosen = LocalSession(root=place.root / "chosen")
        assert place.make(sagemaker_session=chosen).sagemaker_session is chosen


@case("launch.fit.tensorboard", worlds=NEW)
def tensorboard_is_a_command(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job, shown = place.make(), io.StringIO()
        with contextlib.redirect_stdout(shown):
            job.fit(run_tensorboard_locally=True)
        assert f"tensorboard --logdir {place.folder(job)}" in shown.getvalue()
        with pytest.raises(ValueError, match="wait"):
            job.fit(run_tensorboard_locally=True, wait=False)


@case("launch.estimators.script_mode", worlds=NEW)
def script_mode_is_the_only_mode(adapter: Adapter) -> None:
    TensorFlow(entry_point="train.py", script_mode=True, py_version="py3")
    with pytest.raises(ConfigError, match="Legacy Mode"):
        TensorFlow(entry_point="train.py", script_mode=False)
    for name in ("checkpoint_path", "training_steps", "evaluation_steps", "requirements_file"):
        with pytest.raises(UnsupportedError, match="Legacy Mode"):
            TensorFlow(entry_point="train.py", **{name: "1"})


@case("launch.what_the_script_sees.tuning", worlds=NEW)
def variables_that_tune_are_passed_on(adapter: Adapter) -> None:
    given = {"TF_DISABLE_MKL": "1", "TF_DISABLE_POOL_ALLOCATOR": "1"}
    with bench(adapter) as place:
        environ = place.seen(place.run(environment=given))["environ"]
        assert {name: environ[name] for name in given} == given
        # Its name in current TensorFlow.
        assert environ["TF_ENABLE_ONEDNN_OPTS"] == "0"


@case(
    "launch.estimators.framework",
    "launch.estimators.python",
    "launch.estimators.image",
    "launch.versions_and_containers.prebuilt_image",
    worlds=NEW,
)
def versions_are_compared_with_what_is_installed(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job = place.run(framework_version="1.6.0", py_version="py36")
        assert f"the job names {adapter.name} 1.6.0; runs" in place.log(job)
        assert "the job names Python py36; runs py3" in place.log(job)
        with pytest.raises(ConfigError, match="must be a version"):
            place.run(framework_version="newest")
        image = f"registry/{job._image()}"
        own = Estimator(image, entry_point="train.py", source_dir=str(place.root / "code"))
        assert own.image_uri == image
        with pytest.raises(UnsupportedError, match="container"):
            Estimator("my/image:1", entry_point="train.py")


_VERSIONS = {
    "1_1": ("1.6.0", "2.3.1"),
    "1_2": ("1.7.1", "2.4.1"),
    "1_3": ("1.8.1", "2.4.1"),
    "1_4": ("1.9.1", "2.6.0"),
    "1_5": ("1.10.0", None),
    "1_6": ("1.8.1", None),
    "1_7": ("1.10.2", None),
    "1_8_1_8_1": ("1.10.2", None),
    "1_9": ("1.11.0", None),
    "1_10_1_10_1": ("1.12.0", None),
    "1_11": ("1.12.0", None),
    "1_13": ("1.12.1", None),
    "1_14": ("1.13.1", None),
    "1_15": ("2.0.0", None),
}


@case(*(f"launch.versions_and_containers.{row}" for row in _VERSIONS), worlds=NEW)
def jobs_of_every_version_are_accepted(adapter: Adapter) -> None:
    with bench(adapter) as place:
        for torch, tensorflow in _VERSIONS.values():
            version = torch if adapter.name == "torch" else tensorflow or "2.6.3"
            job = place.make(framework_version=version, py_version="py36")
            assert version in job._image()


@case(
    "launch.estimators.strategy",
    "launch.distribution_distributio.model_parallel",
    "launch.distribution_distributio.mpi",
    "launch.distribution_distributio.hand_over",
    "launch.distribution_distributio.efa_hint",
    worlds=NEW,
)
def a_model_parallel_job_runs(adapter: Adapter) -> None:
    parallel = {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4}}
    options = "-x SHOWN=1 -x FI_PROVIDER=efa --mca btl_vader_single_copy_mechanism none"
    mpi = {"enabled": True, "processes_per_host": 2, "custom_mpi_options": options}
    strategy = {"smdistributed": {"modelparallel": parallel}, "mpi": mpi}
    with bench(adapter) as place:
        job = place.run(_STARTS.format(framework=adapter.name), distribution=strategy)
        assert "size 2 2 1 efa" in place.log(job)
        written = job.hyperparameters()
        assert written["mp_parameters"] == parallel["parameters"]
        assert written["sagemaker_mpi_num_of_processes_per_host"] == 2
        for wrong, match in (
            ({"smdistributed": {"modelparallel": parallel}}, "mpi.enabled"),
            ({**strategy, "mpi": {**mpi, "processes_per_host": 9}}, "must not exceed the GPUs"),
            ({**strategy, "mpi": {**mpi, "process_per_host": 2}}, "processes_per_host"),
            ({**strategy, "mpi": {**mpi, "custom_mpi_options": "NCCL_DEBUG INFO"}}, "MPI options"),
        ):
            with pytest.raises(ConfigError, match=match):
                place.make(distribution=wrong, instance_type="ml.p3.16xlarge")


@case("launch.distribution_distributio.horovod_alone", worlds=NEW)
def any_script_of_mpi_is_started(adapter: Adapter) -> None:
    script = "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(1))"
    with bench(adapter) as place:
        job = place.run(script, distribution={"mpi": {"enabled": True, "processes_per_host": 2}})
        assert place.log(job).count("sum 2") == 2


@case("launch.distribution_distributio.data_parallel_library", worlds=NEW)
def the_data_parallel_library_is_refused(adapter: Adapter) -> None:
    data_parallel = {"dataparallel": {"enabled": True}}
    with bench(adapter) as place, pytest.raises(UnsupportedError, match="another library"):
        place.make(distribution={"smdistributed": data_parallel})
    both = {**data_parallel, "modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}
    mpi = {"enabled": True, "processes_per_host": 2}
    with bench(adapter) as place, pytest.raises(ConfigError, match="exclude each other"):
        place.make(distribution={"smdistributed": both, "mpi": mpi})


@case("launch.distribution_distributio.parameter_servers", worlds=NEW)
def a_cluster_of_parameter_servers_is_described(adapter: Adapter) -> None:
    script = """
import json, os, time
config = json.loads(os.environ["TF_CONFIG"])
print("is", config["task"]["type"], {kind: len(found) for kind, found in config["cluster"].items()})
if config["task"]["type"] != "chief":
    time.sleep(60)
"""
    strategy = {"parameter_server": {"enabled": True}}
    with bench(adapter) as place:
        if adapter.name == "torch":
            with pytest.raises(ConfigError, match="is for tensorflow"):
                place.make(instance_count=2, distribution=strategy)
            return
        job = place.run(script, instance_count=2, distribution=strategy)
        assert "is chief {'chief': 1, 'worker': 1, 'ps': 2}" in place.log(job)
        mpi = {"enabled": True, "processes_per_host": 1}
        with pytest.raises(ConfigError, match="exclude each other"):
            place.make(distribution={**strategy, "mpi": mpi})


@later("launch.data_file.pipe_mode", "launch.data_file.compression", frameworks=FRAMEWORKS)
def channels_are_streams(adapter: Adapter) -> None:
    with bench(adapter) as place:
        given = TrainingInput(str(place.data()), input_mode="Pipe", compression="Gzip")
        place.run(inputs={"train": given})


@later(
    "launch.deploy.endpoint",
    "launch.deploy.two_kinds",
    "launch.deploy.predictor",
    "launch.deploy.accelerators",
    frameworks=FRAMEWORKS,
)
def a_model_is_served(adapter: Adapter) -> None:
    with bench(adapter) as place:
        place.make().deploy(initial_instance_count=1, instance_type="local")


@later(
    "launch.versions_and_containers.extended_image",
    "launch.versions_and_containers.own_image",
    frameworks=FRAMEWORKS,
)
def containers(adapter: Adapter) -> None:
    Estimator("my/image:1", entry_point="/opt/ml/code/train.py")
