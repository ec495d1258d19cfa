"""Jobs from fit to their results: followed, attached to, limited, resumed."""

from __future__ import annotations

import contextlib
import io
import tarfile

import pytest

from conformance.adapters.base import Adapter
from conformance.bench import bench
from conformance.registry import job_case
from smdistributed.modelparallel.common.errors import ConfigError


@job_case(
    "launch.results.model_artifact",
    "launch.results.output_files",
    "launch.results.only_rank_0_writes",
    "launch.estimators.result_place",
    "launch.fit.job_object",
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


@job_case(
    "launch.fit.blocking",
    "launch.fit.attach",
    "launch.fit.name",
    "launch.fit.states",
    "launch.estimators.name",
)
def a_job_goes_on_and_is_attached_to(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.exceptions import UnknownJobError
    from smdistributed.modelparallel.launch.pytorch import PyTorch
    from smdistributed.modelparallel.launch.tensorflow import TensorFlow

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


@job_case("launch.fit.start", "launch.fit.log_display")
def the_log_is_shown_and_a_failure_raised(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.exceptions import UnexpectedStatusException

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


@job_case("launch.estimators.time")
def time_is_limited(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job = place.run("import time; time.sleep(60)", max_run=1)
        assert job.latest_training_job.describe()["TrainingJobStatus"] == "Stopped"
        assert place.make(train_max_run=5).max_run == 5


@job_case("launch.estimators.resume", "launch.results.checkpoints")
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


@job_case("launch.fit.tensorboard")
def tensorboard_is_a_command(adapter: Adapter) -> None:
    with bench(adapter) as place:
        job, shown = place.make(), io.StringIO()
        with contextlib.redirect_stdout(shown):
            job.fit(run_tensorboard_locally=True)
        assert f"tensorboard --logdir {place.folder(job)}" in shown.getvalue()
        with pytest.raises(ValueError, match="wait"):
            job.fit(run_tensorboard_locally=True, wait=False)
