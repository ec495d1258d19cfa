"""Models behind endpoints."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import Adapter
from conformance.bench import Bench, bench
from conformance.registry import JOBS, job_case
from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError

_SAVES = {
    "torch": """
import os, torch
def model_fn(folder):
    return torch.load(os.path.join(folder, "w.pt"))
def predict_fn(data, w):
    return data * w
if __name__ == "__main__":
    torch.save(torch.tensor(2.0), os.path.join(os.environ["SM_MODEL_DIR"], "w.pt"))
""",
    # As scripts leave it: without a folder for the version.
    "tensorflow": """
import os, tensorflow as tf
class Twice(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def __call__(self, x):
        return {"y": 2.0 * x}
tf.saved_model.save(Twice(), os.environ["SM_MODEL_DIR"])
""",
}


@contextlib.contextmanager
def served(place: Bench, model: Any, **given: Any) -> Iterator[Any]:
    """Yields a predictor that speaks JSON; its endpoint ends afterwards."""
    from smdistributed.modelparallel.launch.deserializers import JSONDeserializer
    from smdistributed.modelparallel.launch.serializers import JSONSerializer

    chosen = {"serializer": JSONSerializer(), "deserializer": JSONDeserializer()}
    predictor = model.deploy(initial_instance_count=1, instance_type="local", **chosen, **given)
    try:
        yield predictor
    finally:
        place.session.serving.delete_endpoint(predictor.endpoint_name)


def rows_of(answer: Any) -> Any:
    """Returns the predictions in an answer: TensorFlow Serving's form wraps them."""
    return answer["predictions"] if isinstance(answer, dict) else answer


@job_case(
    "launch.deploy.endpoint",
    "launch.deploy.two_kinds",
    "launch.deploy.predictor",
    "launch.deploy.from_an_archive",
    "launch.deploy.accelerators",
    "launch.results.serving_form",
    quick_with=("torch", "tensorflow"),
    needs=(*JOBS, "kserve"),
)
def a_model_is_served(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.exceptions import (
        LaunchError,
        ModelError,
        UnknownEndpointError,
    )
    from smdistributed.modelparallel.launch.pytorch import PyTorchModel
    from smdistributed.modelparallel.launch.tensorflow import TensorFlowModel

    with bench(adapter) as place:
        script = _SAVES[adapter.name]
        with pytest.raises(LaunchError, match="there is no job yet: call fit"):
            place.make(script).deploy(1, "local")
        job = place.run(script)
        with pytest.raises(ConfigError, match="endpoint_type"):
            job.deploy(1, "local", endpoint_type="python")
        with contextlib.ExitStack() as stack:
            with pytest.warns(ConfigWarning, match="no effect here: accelerator_type"):
                predictor = stack.enter_context(
                    served(place, job, accelerator_type="ml.eia1.medium")
                )
            assert predictor.endpoint_name == job.latest_training_job.name
            assert rows_of(predictor.predict([[1.0, 2.0]])) == [[2.0, 4.0]]
            with pytest.raises(ModelError, match="status 400"):
                predictor.predict([["word", "word"]])
            with pytest.raises(ConfigError, match="there is an endpoint"):
                job.deploy(1, "local")
        with pytest.raises(UnknownEndpointError):
            predictor.predict([[1.0, 2.0]])
        # From an archive, without training.
        archive = Path(str(shutil.copy(job.model_data, place.root / "kept.tar.gz")))
        kind: Any = PyTorchModel if adapter.name == "torch" else TensorFlowModel
        code = {"entry_point": "train.py", "source_dir": str(place.root / "code")}
        model = kind(
            model_data=f"file://{archive}",
            role="role",
            sagemaker_session=place.session,
            **(code if adapter.name == "torch" else {}),
        )
        with served(place, model, endpoint_name="again") as predictor:
            assert rows_of(predictor.predict([[1.0, 2.0]])) == [[2.0, 4.0]]
