"""What bodies train: a model for a few steps, with the library or without, and its numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tf_models import PROBLEMS
from tf_worlds import MICROBATCHES, library

from smdistributed.modelparallel.tensorflow.parameters.variables import is_here

STEPS = 5


@dataclass(frozen=True)
class Trained:
    """Numbers of one model on one process.

    Attributes:
        losses: of each step.
        gradients: of the last step by position of the variable in the whole model, as arrays.
        weights: after training, by position.
        held: positions of the variables of this process.
        num_variables: of the whole model.
        operations: of the whole model's trace, by name, constants aside.
        own: those that this process executes.
    """

    losses: list[float]
    gradients: dict[int, Any]
    weights: dict[int, Any]
    held: list[int]
    num_variables: int
    operations: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


def train(name: str, as_on_gpus: bool = False) -> Trained:
    """Trains one model with the library; to be called on every rank.

    Args:
        name: of the problem.
        as_on_gpus: transfers are what they are on GPUs, also where there are none.
    """
    with _transfers_as_on_gpus() if as_on_gpus else contextlib.nullcontext():
        return _train(name)


@contextlib.contextmanager
def _transfers_as_on_gpus() -> Iterator[None]:
    """Makes the library sum with zeros, in an order; TensorFlow uses a CPU where no GPU is."""
    links = library().links
    saved, links._has_gpu = links._has_gpu, True
    try:
        yield
    finally:
        links._has_gpu = saved


def _train(name: str) -> Trained:
    import smdistributed.modelparallel.tensorflow as smp

    config = library().config
    problem = PROBLEMS[name](smp.DistributedModel, by_hand())
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
        if config.horovod:
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
    traced, local = model._smp_engine.newest
    functions = [program.function.graph for program in local.programs]
    return Trained(
        losses,
        {every.index(id(v)): g.numpy() for g, v in pairs if id(v) in every},
        {every.index(id(v)): _array(v) for v in model.variables},
        [place for place, variable in enumerate(variables) if is_here(variable)],
        len(every),
        _names(traced.operations),
        [name for graph in functions for name in _names(graph.get_operations())],
    )


def _names(operations: Any) -> list[str]:
    return [op.name for op in operations if op.type not in ("Const", "Placeholder")]


def by_hand() -> Any:
    """Returns what the models mark their halves with.

    Over four partitions the marks of a half are one partition and the other in turn.
    """
    import smdistributed.modelparallel.tensorflow as smp

    if smp.pp_size() == 1 or library().config.auto_partition:
        return no_partition
    each = smp.pp_size() // 2
    turns = itertools.count()
    return lambda half: smp.partition(half * each + next(turns) // 2 % each)


def train_plainly(name: str) -> Trained:
    """Trains a model with TensorFlow alone, on the same microbatches."""
    problem = PROBLEMS[name](tf.keras.Model, no_partition)
    model, optimizer = problem.model, tf.keras.optimizers.Adam(0.01)

    @tf.function
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

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
    pairs = zip(gradients, model.trainable_variables, strict=True)
    return Trained(
        losses,
        {every.index(id(v)): g.numpy() for g, v in pairs},
        {every.index(id(v)): _array(v) for v in model.variables},
        list(range(len(every))),
        len(every),
    )


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
