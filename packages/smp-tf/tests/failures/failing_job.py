"""A training in which one rank fails in a given way and place while the others work.

Usage: failing_job.py FAILURE PLACE CULPRIT TIMEOUT_SECONDS NOTES, where NOTES is a folder in which
the culprit leaves the time of its failure.

Places: ``between`` two steps; ``executing`` an operation of a step; ``building`` the graph of one,
in Python; ``tracing`` the model, in Python; with a graph ``built``, which the others execute.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

FAILURE, PLACE, CULPRIT = sys.argv[1], sys.argv[2], int(sys.argv[3])
TIMEOUT_SECONDS, NOTES = float(sys.argv[4]), Path(sys.argv[5])
STEPS_BEFORE = 3
CAUGHT = 3


def fail() -> None:
    (NOTES / "event").write_text(str(time.time()))
    if FAILURE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAILURE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAILURE == "exception":
        raise ValueError("planted failure")
    elif FAILURE == "exit":
        sys.exit(3)
    elif FAILURE == "leave":
        sys.exit(0)
    elif FAILURE == "late":
        time.sleep(2 * TIMEOUT_SECONDS)


class Bomb:
    """Passes what it is called with on; fails once it is armed."""

    is_armed = False

    def __call__(self, place: str) -> None:
        if self.is_armed and place == PLACE and smp.rank() == CULPRIT:
            fail()


bomb = Bomb()


@tf.custom_gradient  # type: ignore[untyped-decorator]
def mined(x: Any) -> Any:
    """Returns x, by an operation that runs Python code."""

    def run(value: Any) -> Any:
        bomb("executing")
        return value

    y = tf.numpy_function(run, [x], tf.float32)
    y.set_shape(x.shape)
    return y, lambda dy: dy


class Net(smp.DistributedModel):
    """One dense layer a partition, each followed by an operation that can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = [
            tf.keras.layers.Dense(16, "tanh", name=f"dense_{i}") for i in range(smp.pp_size())
        ]

    def call(self, x: Any) -> Any:
        """Computes the outputs."""
        bomb("tracing")
        for index, layer in enumerate(self.dense):
            with smp.partition(index):
                x = mined(layer(x))
        return x


def train() -> None:
    model = Net()
    optimizer = tf.keras.optimizers.SGD(0.01)

    def body(x: Any) -> Any:
        bomb("building")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        bomb("built")  # the ranks agree on a graph in the model's first call, no more after it
        return gradients

    step, num_caught = smp.step(body), 0
    for number in range(1000):
        bomb.is_armed = number == STEPS_BEFORE
        bomb("between")
        # Another shape, so that what was built before is of no use.
        is_new = bomb.is_armed and PLACE in ("building", "tracing", "built")
        try:
            gradients = step(tf.ones([16 if is_new else 8, 16]))
        except tf.errors.OpError:
            num_caught += 1
            if FAILURE != "late":
                raise
            if num_caught == CAUGHT:
                return
            continue
        optimizer.apply_gradients(
            zip((each.accumulate() for each in gradients), model.trainable_variables, strict=True)
        )


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
smp.init(
    {
        "pipeline_parallel_degree": int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        "microbatches": 4,
        "communication_timeout": TIMEOUT_SECONDS,
        "auto_partition": False,
        "default_partition": 0,
    }
)
train()
