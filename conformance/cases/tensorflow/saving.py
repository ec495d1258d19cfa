"""TensorFlow: ``DistributedModel.save_model``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import Array
from conformance.cases.tensorflow.checkpoints import Training, shared_folder
from conformance.cases.tensorflow.model import run
from conformance.registry import tensorflow_case
from smdistributed.modelparallel.common.testing import run_ranks

_ROW = "smp.DistributedModel.save_model"


def served(folder: str, x: Array) -> Array:
    """Returns what a saved model makes of x, in a process that knows TensorFlow alone."""
    import tensorflow as tf

    serve = tf.saved_model.load(folder).signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    (found,) = serve(**{name: tf.constant(x)}).values()
    outputs: Array = found.numpy()
    return outputs


def _serves(adapter: Any, model: Any, folder: Path) -> None:
    """Asserts that what is in the folder computes what the model does."""
    smp, x = adapter.smp, adapter.batch(8)
    wanted = adapter.array(run(adapter, model).concat())
    smp.barrier()
    if smp.rank() == 0:
        # Of the job's own variables nothing may reach a process that is not of the job.
        alone = {name: None for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PMI_"))}
        (got,) = run_ranks(
            1, served, launcher="python", timeout=90, env=alone, args=[str(folder), x]
        ).results
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@tensorflow_case(
    "smp.DistributedModel.save_model(save_path)", _ROW, worlds=("alone", "both"), is_quick=False
)
def a_saved_model_is_whole_and_has_the_newest_weights(adapter: Any) -> None:
    with shared_folder(adapter) as folder:
        training = Training(adapter)
        for steps in (1, 2):
            training.go(steps)
            training.model.save_model(str(folder / "model"))
        _serves(adapter, training.model, folder / "model")


@tensorflow_case("smp.DistributedModel.save_model(save_path)", _ROW, worlds=("pipeline",))
def the_folder_is_that_of_the_platform(adapter: Any) -> None:
    with shared_folder(adapter) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SM_MODEL_DIR", str(folder / "collected"))
        model = adapter.model()
        run(adapter, model)
        model.save_model()
        _serves(adapter, model, folder / "collected")


@tensorflow_case(_ROW, worlds=("alone", "pipeline"))
def a_model_without_variables_yet_is_not_saved(adapter: Any) -> None:
    with shared_folder(adapter) as folder, pytest.raises(RuntimeError):
        adapter.model().save_model(str(folder / "model"))


@tensorflow_case(_ROW, worlds=("alone", "pipeline"))
def a_place_that_cannot_be_written_is_named(adapter: Any) -> None:
    model = adapter.model()
    run(adapter, model)
    with shared_folder(adapter) as folder:
        (folder / "file").touch()
        place = folder / "file" / "model"
        with pytest.raises(Exception, match=str(place)):
            model.save_model(str(place))
