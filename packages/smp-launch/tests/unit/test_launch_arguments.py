"""Every argument of the estimators, from the table: used, noted in one line, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.debugger import ProfilerRule, Rule, rule_configs
from smdistributed.modelparallel.launch.estimator import Estimator, EstimatorBase
from smdistributed.modelparallel.launch.huggingface import HuggingFace
from smdistributed.modelparallel.launch.job import status
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.request import arguments
from smdistributed.modelparallel.launch.request.arguments import TABLE
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.tensorflow import TensorFlow

ESTIMATORS: dict[str, tuple[type[EstimatorBase], dict[str, Any]]] = {
    "Estimator": (Estimator, {"image_uri": "host/pytorch-training:2.13.0-cpu-py311"}),
    "PyTorch": (PyTorch, {}),
    "TensorFlow": (TensorFlow, {}),
    "HuggingFace": (HuggingFace, {"pytorch_version": "2.13.0"}),
}
#: A value for each used argument that the document of a job must show, and where.
SHOWN: dict[str, tuple[Any, str, Any]] = {
    "role": ("me", "RoleArn", "me"),
    "instance_count": (3, "ResourceConfig.InstanceCount", 3),
    "instance_type": ("ml.p3.16xlarge", "ResourceConfig.InstanceType", "ml.p3.16xlarge"),
    "hyperparameters": ({"lr": 0.1}, "HyperParameters.lr", "0.1"),
    "distribution": (
        {"mpi": {"enabled": True, "processes_per_host": 2}},
        "HyperParameters.sagemaker_mpi_num_of_processes_per_host",
        "2",
    ),
    "entry_point": ("train.py", "HyperParameters.sagemaker_program", '"train.py"'),
    "output_path": ("s3://b/out", "OutputDataConfig.S3OutputPath", "s3://b/out"),
    "max_run": (60, "StoppingCondition.MaxRuntimeInSeconds", 60),
    "max_wait": (90, "StoppingCondition.MaxWaitTimeInSeconds", 90),
    "input_mode": ("FastFile", "AlgorithmSpecification.TrainingInputMode", "FastFile"),
    "environment": ({"A": "1"}, "Environment.A", "1"),
    "metric_definitions": (
        [{"Name": "loss", "Regex": "loss: (.*)"}],
        "AlgorithmSpecification.MetricDefinitions",
        [{"Name": "loss", "Regex": "loss: (.*)"}],
    ),
    "checkpoint_s3_uri": ("s3://b/c", "CheckpointConfig.S3Uri", "s3://b/c"),
    "container_log_level": (10, "HyperParameters.sagemaker_container_log_level", "10"),
    "tags": ([{"Key": "a", "Value": "b"}], "Tags", [{"Key": "a", "Value": "b"}]),
    "use_spot_instances": (True, "EnableManagedSpotTraining", True),
    "max_retry_attempts": (2, "RetryStrategy.MaximumRetryAttempts", 2),
    "model_dir": ("/m", "HyperParameters.model_dir", '"/m"'),
    "framework_version": (
        "2.12.0",
        "AlgorithmSpecification.TrainingImage",
        "pytorch-training:2.12.0-cpu",
    ),
    "py_version": ("py38", "AlgorithmSpecification.TrainingImage", "pytorch-training:cpu-py38"),
}
#: Those of which the document does not show the value itself; other tests do.
ELSEWHERE = {
    *("source_dir", "dependencies", "image_uri", "base_job_name", "code_location"),
    *("checkpoint_local_path", "tensorboard_output_config", "sagemaker_session", "script_mode"),
    *("transformers_version", "pytorch_version", "tensorflow_version", "git_config", "rules"),
}


def make(estimator: str, root: Path, **given: Any) -> EstimatorBase:
    kind, needed = ESTIMATORS[estimator]
    script = root / "train.py"
    script.touch()
    session = Session(root=root / "jobs")
    base = {"entry_point": str(script), "sagemaker_session": session}
    return kind(**{**needed, **base, **given})


def document_of(estimator: EstimatorBase) -> dict[str, Any]:
    with estimator._code() as code:
        return estimator._request("job-1", None, code)


def at(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document[name]
    return document


def test_each_used_argument_is_tried() -> None:
    used = {argument.name for argument in TABLE if argument.effect == "used"}
    assert used == set(SHOWN) | ELSEWHERE


@pytest.mark.parametrize("name", SHOWN)
def test_a_used_argument_is_in_the_document(tmp_path: Path, name: str) -> None:
    value, path, wanted = SHOWN[name]
    kind = "TensorFlow" if name == "model_dir" else "PyTorch"
    given = {name: value}
    if name == "entry_point":
        (tmp_path / "train.py").touch()
        given = {"source_dir": str(tmp_path), name: value}
    before = document_of(make(kind, tmp_path))
    found = document_of(make(kind, tmp_path, **given))
    assert at(found, path) == wanted
    assert found != before or name in ("entry_point",)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_noted_argument_is_said_in_one_line(tmp_path: Path, kind: str) -> None:
    noted = sorted(
        name for name, each in arguments.arguments_of(kind).items() if each.effect == "noted"
    )
    assert len(noted) > 10
    with pytest.warns(ConfigWarning) as caught:
        make(kind, tmp_path, **dict.fromkeys(noted, "x"))
    assert [str(warning.message) for warning in caught] == [f"no effect here: {', '.join(noted)}."]
    # The line of the user's script.
    assert caught[0].filename == __file__


def test_rules_are_kept_and_said_to_do_nothing(tmp_path: Path) -> None:
    rules = [Rule.sagemaker(rule_configs.loss_not_decreasing()), ProfilerRule.custom("own")]
    with pytest.warns(ConfigWarning, match="no effect here: rules") as caught:
        estimator = make("PyTorch", tmp_path, rules=rules)
    assert caught[0].filename == __file__
    document = document_of(estimator)
    assert [each["RuleConfigurationName"] for each in document["DebugRuleConfigurations"]] == [
        "LossNotDecreasing",
        "own",
    ]
    stopped = {each["RuleEvaluationStatus"] for each in status.of_rules(document)}
    assert stopped == {"Stopped"}
    with pytest.raises(ConfigError, match=r"made by Rule\.sagemaker.*got 'x'"):
        document_of(make("PyTorch", tmp_path, rules=["x"]))


REFUSED = [(kind, each) for each in TABLE if each.effect == "refused" for kind in each.of]


@pytest.mark.parametrize(
    ("kind", "argument"), REFUSED, ids=lambda each: getattr(each, "name", each)
)
def test_a_refused_argument_says_the_way_out(tmp_path: Path, kind: str, argument: Any) -> None:
    with pytest.raises(UnsupportedError) as error:
        make(kind, tmp_path, **{argument.name: "x"})
    assert str(error.value) == f"{kind}: {argument.name} is not offered: {argument.meaning}."


@pytest.mark.parametrize(
    "argument", [each for each in TABLE if each.old], ids=lambda each: each.name
)
def test_former_names_are_taken(tmp_path: Path, argument: Any) -> None:
    kind = argument.of[-1]
    value = SHOWN.get(argument.name, ("pytorch-training:1",))[0]
    (old,) = argument.old
    made = make(kind, tmp_path, **{old: value})
    assert getattr(made, argument.name) == value
    with pytest.raises(ConfigError, match=f"{argument.name} and {old} are one argument"):
        make(kind, tmp_path, **{old: value, argument.name: "other"})


def test_a_typo_suggests_the_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PyTorch: instance_cout is not .* instance_count"):
        make("PyTorch", tmp_path, instance_cout=1)
    with pytest.raises(ConfigError) as error:
        make("TensorFlow", tmp_path, hyperparameter={}, frobnicate=1)
    assert len(str(error.value).splitlines()) == 2, "every problem is listed"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"instance_count": 0}, r"at least 1; got 0"),
        ({"instance_count": True}, r"at least 1; got True"),
        ({"instance_type": "locl"}, r"did you mean 'local'"),
        ({"instance_type": "ml.zz9.huge"}, r"a type of the service such as 'ml.p3.16xlarge'"),
        ({"instance_type": "ml.zz9.xlarge"}, r"did you mean 'ml.p3.8xlarge' or"),
        ({"instance_type": "p4d.24xlarge"}, r"did you mean 'ml.p4d.24xlarge' or"),
        ({"instance_type": "ml.c9x.xxlarge"}, r"did you mean 'ml.c9x.xlarge' or"),
        (
            {"instance_count": 2, "hyperparameters": {"mp_parameters": {"partitions": 2}}},
            r"need a distribution that joins the hosts; got none: each of the 2 hosts",
        ),
        ({"hyperparameters": ["steps"]}, r"must be a dictionary of values by their names"),
        ({"instance_type": "local_gpu"}, r"needs a GPU"),
        ({"framework_version": "latest"}, r"must be a version such as .*'latest'"),
        ({"hyperparameters": {"a": object()}}, r"a is object"),
        ({"hyperparameters": {1: 2}}, r"must be a text; got 1"),
        ({"entry_point": "missing.py"}, r"must be a file; there is none at /.*missing\.py"),
        ({"base_job_name": "my_job"}, r"got 'my_job': use 'my-job'"),
        ({"distribution": []}, r"must be a dictionary"),
        ({"metric_definitions": [{"Name": "a", "Regex": "("}]}, r"no regular expression"),
        ({"environment": {"A": 1}}, r"Environment\.A: .*valid string; got 1"),
        ({"max_run": 0}, r"MaxRuntimeInSeconds: .*greater than or equal to 1; got 0"),
    ],
)
def test_what_is_wrong_is_an_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], match: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=match):
        make("PyTorch", tmp_path, **given).fit()
    assert not list(tmp_path.glob("jobs/*"))


def test_an_image_that_needs_a_container_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'my/image:1' is no image of PyTorch"):
        make("Estimator", tmp_path, image_uri="my/image:1")
    with pytest.raises(ConfigError, match="needs image_uri"):
        Estimator(entry_point="train.py")


def test_only_script_mode_is_offered(tmp_path: Path) -> None:
    make("TensorFlow", tmp_path, script_mode=True)
    with pytest.raises(ConfigError, match="Legacy Mode is not offered"):
        make("TensorFlow", tmp_path, script_mode=False)


def test_the_script_of_tensorflow_is_told_a_model_dir(tmp_path: Path) -> None:
    def told(**given: Any) -> Any:
        document = document_of(make("TensorFlow", tmp_path, **given))
        return document["HyperParameters"].get("model_dir")

    mpi = {"mpi": {"enabled": True, "processes_per_host": 1}}
    assert told() == '"/opt/ml/model"'
    assert told(instance_count=2, distribution=mpi) == '"/opt/ml/model"'
    assert told(instance_count=2) == '"/opt/ml/shared/model"'
    assert told(model_dir=False) is None


def test_the_page_lists_every_argument() -> None:
    page = arguments.page()
    assert all(f"| `{argument.name}` |" in page for argument in TABLE)


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ({"pytorch_version": "1.13.1"}, "huggingface-pytorch-training:1.13.1-cpu"),
        (
            {"pytorch_version": "1.13.1", "transformers_version": "4.26.0", "py_version": "py39"},
            "huggingface-pytorch-training:1.13.1-transformers4.26.0-cpu-py39",
        ),
        (
            {"pytorch_version": None, "tensorflow_version": "2.6.3"},
            "huggingface-tensorflow-training:2.6.3-cpu",
        ),
    ],
)
def test_hugging_face_names_its_image(tmp_path: Path, given: dict[str, Any], image: str) -> None:
    document = document_of(make("HuggingFace", tmp_path, **given))
    assert document["AlgorithmSpecification"]["TrainingImage"] == image
    again = HuggingFace._arguments_of({**document, "StoppingCondition": {"MaxRuntimeInSeconds": 1}})
    assert {key: again.get(key) for key in given if given[key]} == {
        key: value for key, value in given.items() if value
    }


def test_hugging_face_wants_one_framework(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of pytorch_version and tensorflow_version"):
        make("HuggingFace", tmp_path, tensorflow_version="2.6.3")
