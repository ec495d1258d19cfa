"""What a job of two ranks executes of a model, and what a large variable costs its ranks."""

from __future__ import annotations

import gc
import io
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework.func_graph import FuncGraph
from tf_beside import Found, Side, by_name
from tf_models import PROBLEMS
from tf_users import dense, model_of
from tf_worlds import MICROBATCHES, library

from smdistributed.modelparallel.common import whereabouts

STEPS = 3
LAYERS = 5
#: Of a microbatch whose 256 numbers each go through a mailbox.
LARGE_ROWS = 2048


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


def execute() -> dict[int, int]:
    """Trains a model; returns how often this rank computed each layer. To be called everywhere."""
    import smdistributed.modelparallel.tensorflow as smp

    counts: Counter[int] = Counter()
    model = counting(smp.DistributedModel, counts)

    @smp.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(y * model(x))
        return tape.gradient(loss, model.trainable_variables)

    rows = tf.ones([8, 8])
    for _ in range(STEPS):
        compute(rows, rows)
    return dict(counts)


def held_up(seconds: float) -> set[str]:
    """Returns what this rank was told to do while another one holds up its step for a while."""
    import smdistributed.modelparallel.tensorflow as smp

    is_held, is_over = threading.Event(), threading.Event()
    told: set[str] = set()

    def hold(x: Any) -> Any:
        if is_held.is_set() and smp.rank() == 1:
            time.sleep(seconds)
        return x

    class Held(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="held")
            self.dense = [tf.keras.layers.Dense(8, name=f"dense_{i}") for i in range(LAYERS)]

        def call(self, x: Any) -> Any:
            for layer in self.dense:
                x = layer(x)
            y = tf.numpy_function(hold, [x], tf.float32)
            y.set_shape(x.shape)
            return y

    def ask() -> None:
        while not is_over.wait(0.05):
            told.update(each.what for each in whereabouts.activities())

    model = Held()
    compute = smp.step(lambda x: model(x))
    compute(tf.ones([8, 8]))
    is_held.set()
    asking = threading.Thread(target=ask)
    asking.start()
    compute(tf.ones([8, 8]))
    is_over.set()
    asking.join()
    return told


def trace_and_drop() -> tuple[int, bool]:
    """Computes a step; returns how often its body ran, and whether its graph outlives it."""
    import smdistributed.modelparallel.tensorflow as smp

    model = counting(smp.DistributedModel, Counter())
    seen: list[Any] = []

    def body(x: Any) -> Any:
        seen.append(weakref.ref(tf.compat.v1.get_default_graph()))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables)

    step = smp.step(body)
    for _ in range(2):
        step(tf.ones([8, 8]))
    del step, body
    gc.collect()
    return len(seen), seen[0]() is not None


def shapes() -> tuple[list[int], list[int]]:
    """Returns numbers of functions and graphs that are there, before new shapes and after them.

    First of a step function that lives and generalizes shapes, then of one that is dropped.
    """
    import smdistributed.modelparallel.tensorflow as smp

    # Without custom gradients, of which TensorFlow keeps each with its graph for ever.
    layers = [tf.keras.layers.Dense(8, name=f"dense_{place}") for place in range(LAYERS)]
    model = smp.DistributedModel(tf.keras.Sequential(layers))

    def body(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables), loss

    def present() -> int:
        gc.collect()
        graphs = sum(isinstance(each, FuncGraph) for each in gc.get_objects())
        return len(context.context().list_function_names()) + graphs

    def run(step: Any, rows: Iterable[int]) -> int:
        for count in rows:
            step(tf.ones([count, 8]))
        return present()

    living = smp.step(body, reduce_retracing=True)
    first = [run(living, (8, 12)), run(living, (16, 20, 24))]
    # A model knows its newest trace.
    other = []
    for rows in ((8, 12), (16, 20, 24)):
        run(smp.step(body), rows)
        other.append(present())
    return first, other


def large(side: Side, rows: int | None) -> Found:
    """Computes gradients of a model whose halves exchange what is large.

    Args:
        side: where.
        rows: of a batch, where a step is made for that; None if it takes any.
    """

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    model = model_of(side, call, first=dense("first", 256), second=dense("second", 1))

    def body(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x)
            loss = tf.reduce_mean(tf.square(y - 0.3))
        return tape.gradient(loss, model.trainable_variables), y

    step = side.step(body)
    step(tf.zeros([MICROBATCHES, 2]))  # it has its variables

    @tf.function(input_signature=[tf.TensorSpec([rows, 2], tf.float32)])
    def run(x: Any) -> Any:
        gradients, y = step(x)
        return [each.accumulate() for each in gradients], y.merge()

    same, gradients = [], []
    for seed in range(3):
        values = np.random.default_rng(seed).uniform(-1, 1, [MICROBATCHES * LARGE_ROWS, 2])
        gradients, y = run(tf.constant(values, tf.float32))
        same.append(y)
    return Found(same, by_name(model.trainable_variables, gradients))


def num_laid() -> int:
    """Returns how many places the mailbox of this process has come to have."""
    return library().links.mailboxes.num_places


def transfers_before_checks() -> tuple[int, list[str]]:
    """Returns how many transfers a step has, and those that start before its batch is checked."""
    import smdistributed.modelparallel.tensorflow as smp

    layers = [tf.keras.layers.Dense(8, name=f"dense_{place}") for place in range(LAYERS)]
    model = smp.DistributedModel(tf.keras.Sequential(layers))
    graphs = []

    @smp.step(input_signature=[tf.TensorSpec([None, 8], tf.float32)])
    def compute(x: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables), loss

    compute(tf.ones([8, 8]))
    operations = graphs[-1].get_operations()
    transfers = [each for each in operations if each.type.startswith("Collective")]
    return len(transfers), [each.name for each in transfers if not _waits_for_check(each)]


def _waits_for_check(operation: Any) -> bool:
    pending, seen = [operation], set()
    while pending:
        each = pending.pop()
        if each.type == "Assert":
            return True
        for earlier in (*(tensor.op for tensor in each.inputs), *each.control_inputs):
            if earlier.name not in seen:
                seen.add(earlier.name)
                pending.append(earlier)
    return False


class Memory(NamedTuple):
    """Bytes of this process.

    Attributes:
        present: in use.
        peak: most that ever were.
    """

    present: int
    peak: int


def memory() -> Memory:
    """Returns what this process uses."""
    text = Path("/proc/self/status").read_text()
    found = [re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM")]
    present, peak = (int(each[1]) * 1024 for each in found if each)
    return Memory(present, peak)


def memory_of_variable(num_bytes: int) -> tuple[Memory, Memory]:
    """Computes a step with a variable on rank 1; returns this process's memory before and after."""
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

    before = memory()
    model = Net()
    smp.step(lambda x: model(x))(tf.ones([MICROBATCHES, 8]))
    return before, memory()


def build() -> str:
    """Returns what a rank prints while it builds the graph of a step, whose stages are all long."""
    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.tensorflow.stepping import function, progress

    problem = PROBLEMS["transformer"](smp.DistributedModel, lambda index: nullcontext())
    printed = io.StringIO()

    class Long(progress.Progress):
        """Stays at each stage until it is told, however fast the machine is."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "stage" and smp.rank() == 0:
                while getattr(self, "stage", "") not in printed.getvalue():
                    time.sleep(0.001)
            super().__setattr__(name, value)

    @smp.step
    def compute(x: Any, y: Any) -> Any:
        return problem.loss(y, problem.model(x))

    with (
        redirect_stderr(printed),
        mock.patch.object(progress, "INTERVAL_SECONDS", 0.02),
        mock.patch.object(function, "Progress", Long),
    ):
        compute(*tf.nest.map_structure(tf.constant, problem.batch))
    return printed.getvalue()


def python_with_gradients() -> None:
    """Backward passes find the tapes of their own forward passes, in one process as well."""
    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 1, "microbatches": 4})

    class Doubled(tf.keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.ensure_shape(tf.py_function(lambda y: y * y, [x], tf.float32), x.shape)

    parts = [tf.keras.layers.Dense(8), Doubled(), tf.keras.layers.Dense(3)]
    net = tf.keras.Sequential([tf.keras.layers.Input((8,)), *parts])
    model = smp.DistributedModel(net)
    x = np.random.RandomState(0).rand(8, 8).astype("float32")

    @smp.step
    def gradients_of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables)

    found = [[each.accumulate().numpy() for each in gradients_of(x)] for _ in range(8)]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(net(x)))
    expected = tape.gradient(loss, net.trainable_variables)
    for gradients in found:
        for one, other in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-6)
