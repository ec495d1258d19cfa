"""What a job of several processes does: trains each model for a few steps, and reports numbers."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tf_models import PROBLEMS

STEPS = 5
MICROBATCHES = 4


@dataclass(frozen=True)
class Trained:
    """Numbers of one model on one process.

    Attributes:
        losses: of each step.
        gradients: of the last step by position of the variable in the whole model, as arrays.
        weights: after training, of the variables of this process, by position.
        num_variables: of the whole model.
    """

    losses: list[float]
    gradients: dict[int, Any]
    weights: dict[int, Any]
    num_variables: int


@dataclass(frozen=True)
class Result:
    """What a case gave on one process: a value, or the traceback of its failure."""

    value: Any = None
    failure: str = ""


def one_thread() -> None:
    """Makes TensorFlow use one thread for each of its two pools."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def train_all(
    config: Mapping[str, object], names: Sequence[str], as_on_gpus: bool
) -> dict[str, Result]:
    """Trains the models of these names; to be called on every rank.

    Args:
        config: of the library.
        names: of problems.
        as_on_gpus: transfers are what they are on GPUs, also where there are none.
    """
    one_thread()
    if as_on_gpus:
        transfer_as_on_gpus()
    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"microbatches": MICROBATCHES, "communication_timeout": 60, **config})
    results = {}
    for name in names:
        tf.keras.utils.set_random_seed(0)
        try:
            results[name] = Result(value=train(name, config))
        except Exception:
            results[name] = Result(failure=f"rank {smp.rank()}: {traceback.format_exc()}")
    return results


def transfer_as_on_gpus() -> None:
    """Makes the library sum with zeros, in an order; TensorFlow uses a CPU where no GPU is."""
    from smdistributed.modelparallel.tensorflow import runtime
    from smdistributed.modelparallel.tensorflow.execute.links import Links

    def on_gpus(*args: Any, has_gpu: bool) -> Links:
        return Links(*args, has_gpu=True)

    runtime.Links = on_gpus  # type: ignore[misc, assignment]


def train(name: str, config: Mapping[str, object]) -> Trained:
    """Trains one model with the library."""
    import smdistributed.modelparallel.tensorflow as smp

    problem = PROBLEMS[name](smp.DistributedModel, by_hand(config))
    model, optimizer = problem.model, tf.keras.optimizers.Adam(0.01)
    share = _share(problem.batch, smp.dp_rank(), smp.dp_size())

    @smp.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    losses = []
    for _ in range(STEPS):
        gradients, loss = compute(*share)
        reduced = [None if each is None else _dense(each.accumulate()) for each in gradients]
        mean = loss.reduce_mean()
        if config.get("horovod"):
            import horovod.tensorflow as hvd

            reduced = [hvd.allreduce(each) for each in reduced]
            mean = hvd.allreduce(mean)
        losses.append(float(mean))
        pairs = [
            (gradient, variable)
            for gradient, variable in zip(reduced, model.trainable_variables, strict=True)
            if gradient is not None
        ]
        optimizer.apply_gradients(pairs)
    _, variables = model._smp_engine.everywhere()
    every = [id(variable) for variable in variables]
    return Trained(
        losses,
        {every.index(id(v)): g.numpy() for g, v in pairs if id(v) in every},
        {every.index(id(v)): _array(v) for v in model.variables},
        len(every),
    )


def by_hand(config: Mapping[str, object]) -> Any:
    """Returns what the models mark their halves with.

    Over four partitions the marks of a half are one partition and the other in turn.
    """
    import smdistributed.modelparallel.tensorflow as smp

    if smp.pp_size() == 1 or config.get("auto_partition", True):
        return no_partition
    each = smp.pp_size() // 2
    turns = itertools.count()
    return lambda half: smp.partition(half * each + next(turns) // 2 % each)


def train_plainly(names: Sequence[str]) -> dict[str, Result]:
    """Trains the models with TensorFlow alone, on the same microbatches."""
    one_thread()
    results = {}
    for name in names:
        tf.keras.utils.set_random_seed(0)
        problem = PROBLEMS[name](tf.keras.Model, no_partition)
        model, optimizer = problem.model, tf.keras.optimizers.Adam(0.01)

        def compute(x: Any, y: Any, problem: Any = problem) -> Any:
            with tf.GradientTape() as tape:
                loss = problem.loss(y, problem.model(x, training=True))
            return tape.gradient(loss, problem.model.trainable_variables), loss

        compute = tf.function(compute)
        losses = []
        for _ in range(STEPS):
            parts = [compute(*_share(problem.batch, m, MICROBATCHES)) for m in range(MICROBATCHES)]
            losses.append(float(sum(loss for _, loss in parts)) / MICROBATCHES)
            gradients = [
                sum(_dense(each) / MICROBATCHES for each in group)
                for group in zip(*(grads for grads, _ in parts), strict=True)
            ]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        every = [id(variable) for variable in model.variables]
        results[name] = Result(
            value=Trained(
                losses,
                {
                    every.index(id(v)): g.numpy()
                    for g, v in zip(gradients, model.trainable_variables, strict=True)
                },
                {every.index(id(v)): _array(v) for v in model.variables},
                len(every),
            )
        )
    return results


def _share(batch: Any, number: int, count: int) -> Any:
    def part(array: Any) -> Any:
        size = len(array) // count
        return tf.constant(array[number * size : (number + 1) * size])

    return tf.nest.map_structure(part, batch)


def no_partition(index: int) -> contextlib.AbstractContextManager[None]:
    """Stands for ``smp.partition`` where there is one partition."""
    return contextlib.nullcontext()


def _dense(value: Any) -> Any:
    return tf.convert_to_tensor(value)


def _array(variable: Any) -> Any:
    return tf.convert_to_tensor(variable).numpy()
