"""Arguments of estimators: which act, and which are accepted for the scripts that have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conformance.adapters.base import Adapter
from conformance.bench import bench
from conformance.registry import JOBS, job_case, later
from conformance.worlds import FRAMEWORKS
from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError


@job_case(
    "launch.estimators.disk",
    "launch.estimators.encryption",
    "launch.estimators.debugger",
    "launch.estimators.metrics_tags_networks",
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


@job_case("launch.estimators.session", "launch.estimators.identity")
def any_session_and_role_will_do(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.session import LocalSession

    with bench(adapter) as place:
        os.environ["SMP_JOBS"] = str(place.root / "elsewhere")
        assert place.make(sagemaker_session=object(), role=None).sagemaker_session.root == Path(
            os.environ["SMP_JOBS"]
        )
        chosen = LocalSession(root=place.root / "chosen")
        assert place.make(sagemaker_session=chosen).sagemaker_session is chosen


@job_case("launch.estimators.script_mode")
def script_mode_is_the_only_mode(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.tensorflow import TensorFlow

    TensorFlow(entry_point="train.py", script_mode=True, py_version="py3")
    with pytest.raises(ConfigError, match="Legacy Mode"):
        TensorFlow(entry_point="train.py", script_mode=False)
    for name in ("checkpoint_path", "training_steps", "evaluation_steps", "requirements_file"):
        with pytest.raises(UnsupportedError, match="Legacy Mode"):
            TensorFlow(entry_point="train.py", **{name: "1"})


@job_case(
    "launch.estimators.framework",
    "launch.estimators.python",
    "launch.estimators.image",
    "launch.versions_and_containers.prebuilt_image",
)
def versions_are_compared_with_what_is_installed(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.estimator import Estimator

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


@job_case(*(f"launch.versions_and_containers.{row}" for row in _VERSIONS))
def jobs_of_every_version_are_accepted(adapter: Adapter) -> None:
    with bench(adapter) as place:
        for torch, tensorflow in _VERSIONS.values():
            version = torch if adapter.name == "torch" else tensorflow or "2.6.3"
            job = place.make(framework_version=version, py_version="py36")
            assert version in job._image()


@later(
    "launch.versions_and_containers.extended_image",
    "launch.versions_and_containers.own_image",
    frameworks=FRAMEWORKS,
    needs=JOBS,
)
def containers(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.estimator import Estimator

    Estimator("my/image:1", entry_point="/opt/ml/code/train.py")
