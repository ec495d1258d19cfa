"""``save_model``: the whole model as a SavedModel that TensorFlow alone loads.

Source: smd_model_parallel_tensorflow.rst, DistributedModel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import CheckpointError, NotPartitionedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import autograph, keras
from smdistributed.modelparallel.tensorflow.compat.variables import free
from smdistributed.modelparallel.tensorflow.model.whole_weights import collected

#: What the platform collects.
DEFAULT_FOLDER = "/opt/ml/model"


def save_model(engine: Any, save_path: str | os.PathLike[str]) -> None:
    """Writes the whole model with its present weights; see ``DistributedModel.save_model``."""
    runtime = engine.runtime
    if not engine.is_partitioned:
        raise NotPartitionedError(
            f"the model {engine.name} has no variables to be saved before the first call of a step "
            "function: save it after that."
        )
    if os.fspath(save_path) == DEFAULT_FOLDER:
        save_path = os.environ.get("SM_MODEL_DIR") or DEFAULT_FOLDER
    folder = Path(save_path)
    failure = None
    if runtime.coordinates.dp_rank == 0:
        writes = runtime.coordinates.pp_rank == 0
        borrowed = collected(engine, writes)
        if writes:
            try:
                _write(engine, folder)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            for variable in borrowed:
                free(variable)
    failures = runtime.communicator.allgather(failure, CommGroup.WORLD)
    if any(failures):
        reason = next(each for each in failures if each)
        raise CheckpointError(f"the model could not be written to {folder}: {reason}")


def _write(engine: Any, folder: Path) -> None:
    """Writes the model, whose variables are all here."""
    example = engine.example
    specs = [each for each in tf.nest.flatten(example) if isinstance(each, tf.TypeSpec)]

    def serve(*inputs: Any) -> Any:
        given = iter(inputs)
        args, kwargs = tf.nest.map_structure(
            lambda each: next(given) if isinstance(each, tf.TypeSpec) else each, example
        )
        return engine.run(*args, **kwargs)

    flat = [_served(spec, f"input_{place}") for place, spec in enumerate(specs)]
    module = tf.Module()
    module.variables_ = [keras.variable_of(each) for each in engine.everywhere()[1]]
    saved, engine.is_tracing = engine.is_tracing, True
    try:
        with engine.runtime.guard.suspended():
            module.serve = tf.function(autograph.converted(serve), input_signature=flat)
            names = _names(example)
            named = tf.function(
                _as_dict(module.serve),
                input_signature=[
                    _served(spec, name) for spec, name in zip(specs, names, strict=True)
                ],
            )
            signatures = {"serving_default": named.get_concrete_function()}
            tf.saved_model.save(module, str(folder), signatures=signatures)
    finally:
        engine.is_tracing = saved


def _served(spec: Any, name: str) -> Any:
    """Returns a spec for batches of any size."""
    if not isinstance(spec, tf.TensorSpec):
        return spec
    shape = [None, *spec.shape[1:]] if spec.shape.rank else spec.shape
    return tf.TensorSpec(shape, spec.dtype, name=name)


def _names(example: tuple[Any, dict[str, Any]]) -> list[str]:
    """Returns names for the inputs of a signature: keys or keywords of one tensor, or numbers."""
    args, kwargs = example
    words: list[str | None] = []
    for value, name in [
        *((each, None) for each in args),
        *((kwargs[k], k) for k in sorted(kwargs)),
    ]:
        if isinstance(value, dict):
            for key in sorted(value):
                count = sum(isinstance(e, tf.TypeSpec) for e in tf.nest.flatten(value[key]))
                words += [str(key)] * count
        else:
            words += [name] * sum(isinstance(e, tf.TypeSpec) for e in tf.nest.flatten(value))
    return [
        word if word is not None and words.count(word) == 1 else f"input_{place}"
        for place, word in enumerate(words)
    ]


def _as_dict(function: Any) -> Any:
    """Returns the function with a dict of outputs, which signatures need."""

    def named(*inputs: Any) -> dict[str, Any]:
        outputs = function(*inputs)
        leaves = tf.nest.flatten(outputs)
        if isinstance(outputs, dict) and len(outputs) == len(leaves):
            return {str(key): outputs[key] for key in outputs}
        return {f"output_{place}": each for place, each in enumerate(leaves)}

    return named
