"""What a job of two ranks executes of some models, and what a large variable costs its ranks."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tf_models import PROBLEMS
from tf_world import one_thread

MICROBATCHES = 4
STEPS = 3
LAYERS = 5
#: With loops, several segments a partition, a shared layer, and state.
NAMES = ("transformer", "lstm", "zigzag", "shared_layer", "cnn")


class Executed(NamedTuple):
    """What one rank executes.

    Attributes:
        whole: by model, the operations of its trace, constants aside.
        own: by model, the operations in the functions that this rank calls.
        counts: how often this rank computed each layer of a model of layers that count.
    """

    whole: dict[str, list[str]]
    own: dict[str, list[str]]
    counts: dict[int, int]


def counting(base: Any, counts: Counter[int]) -> Any:
    """Returns a model of layers; Python code behind each counts how often it is computed."""

    def counted(number: int) -> Callable[[Any], Any]:
        def count(value: Any) -> Any:
            counts[number] += 1
            return value

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def apply(x: Any) -> Any:
            y = tf.numpy_function(count, [x], tf.float32)
            y.set_shape(x.shape)
            return y, lambda dy: dy

        function: Callable[[Any], Any] = apply
        return function

    class Counting(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="counting")
            self.dense = [tf.keras.layers.Dense(8, name=f"dense_{i}") for i in range(LAYERS)]

        def call(self, x: Any) -> Any:
            for number, layer in enumerate(self.dense):
                x = counted(number)(layer(x))
            return x

    return Counting()


def execute() -> Executed:
    """Trains models; to be called on every rank."""
    one_thread()
    import smdistributed.modelparallel.tensorflow as smp

    config = {"microbatches": MICROBATCHES, "communication_timeout": 60}
    smp.init({"pipeline_parallel_degree": 2, **config})

    def train(model: Any, batch: Any, loss_of: Callable[[Any, Any], Any]) -> None:
        @smp.step
        def compute(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            return tape.gradient(loss, model.trainable_variables)

        for _ in range(STEPS):
            compute(*batch)

    counts: Counter[int] = Counter()
    rows = tf.ones([8, 8])
    train(counting(smp.DistributedModel, counts), (rows, rows), lambda y, z: tf.reduce_sum(y * z))
    executed = Executed({}, {}, dict(counts))
    for name in NAMES:
        problem = PROBLEMS[name](smp.DistributedModel, smp.partition)
        train(problem.model, tf.nest.map_structure(tf.constant, problem.batch), problem.loss)
        ((traced, local),) = problem.model._smp_engine.programs.values()
        executed.whole[name] = _names(traced.operations)
        executed.own[name] = [
            each for block in local.blocks for each in _names(block.function.graph.get_operations())
        ]
    return executed


def _names(operations: Any) -> list[str]:
    return [op.name for op in operations if op.type not in ("Const", "Placeholder")]


def peak_with_variable(num_bytes: int) -> int:
    """Computes a step of a model with a variable on rank 1; returns this process's peak memory."""
    one_thread()
    import smdistributed.modelparallel.tensorflow as smp

    class Table(tf.keras.layers.Layer):  # type: ignore[misc]
        def build(self, input_shape: Any) -> None:
            self.table = self.add_weight(
                name="table", shape=(num_bytes // 4 // 8, 8), initializer="ones"
            )
            self.built = True

        def call(self, x: Any) -> Any:
            return x + tf.gather(self.table, [0])

    class Net(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.dense, self.large = tf.keras.layers.Dense(8), Table()

        def call(self, x: Any) -> Any:
            with smp.partition(0):
                x = self.dense(x)
            with smp.partition(1):
                return self.large(x)

    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "communication_timeout": 60,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    model = Net()
    smp.step(lambda x: model(x))(tf.ones([4, 8]))
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def build() -> str:
    """Returns what a rank prints while it builds the graph of a step."""
    one_thread()
    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.tensorflow import progress

    progress.INTERVAL_SECONDS = 0.02
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
    problem = PROBLEMS["transformer"](smp.DistributedModel, lambda index: nullcontext())

    @smp.step
    def compute(x: Any, y: Any) -> Any:
        return problem.loss(y, problem.model(x))

    printed = io.StringIO()
    with redirect_stderr(printed):
        compute(*tf.nest.map_structure(tf.constant, problem.batch))
    return printed.getvalue()
