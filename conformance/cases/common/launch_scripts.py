"""What a script of a job sees: its files, variables and arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conformance.adapters.base import Adapter
from conformance.bench import bench
from conformance.registry import job_case
from smdistributed.modelparallel.common.errors import ConfigError


@job_case(
    "launch.estimators.script",
    "launch.estimators.code_folder",
    "launch.estimators.extra_code",
    "launch.what_the_script_sees.guard",
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


@job_case(
    "launch.estimators.arguments",
    "launch.what_the_script_sees.arguments",
    "launch.what_the_script_sees.argument_names",
    "launch.what_the_script_sees.config_files",
    "launch.estimators.tensorflow_results",
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


@job_case(
    "launch.what_the_script_sees.model_folder",
    "launch.what_the_script_sees.output_folder",
    "launch.what_the_script_sees.data_folders",
    "launch.what_the_script_sees.devices",
    "launch.what_the_script_sees.rest",
    "launch.estimators.input",
    "launch.fit.inputs",
    "launch.data_file.file_mode",
    "launch.data_file.channel_object",
)
def folders_and_channels_are_there(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.exceptions import StorageError
    from smdistributed.modelparallel.launch.inputs import TrainingInput

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


@job_case(
    "launch.estimators.hosts", "launch.estimators.host_type", "launch.what_the_script_sees.hosts"
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


@job_case("launch.what_the_script_sees.tuning")
def variables_that_tune_are_passed_on(adapter: Adapter) -> None:
    given = {"TF_DISABLE_MKL": "1", "TF_DISABLE_POOL_ALLOCATOR": "1"}
    with bench(adapter) as place:
        environ = place.seen(place.run(environment=given))["environ"]
        assert {name: environ[name] for name in given} == given
        # Its name in current TensorFlow.
        assert environ["TF_ENABLE_ONEDNN_OPTS"] == "0"
