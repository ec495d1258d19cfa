"""What the library costs: a pipeline of two processes beside plain TensorFlow.

    smprun -n 2 benchmarks/tensorflow/host.py throughput first
    smprun -n 2 benchmarks/tensorflow/host.py throughput --width 2048 --length 512 --blocks 8

Each process has one core, or one GPU where there are any; a GPU wants a larger model.

``throughput``: a step of two partitions against the same step in one process. Two processes that
share a machine slow each other down, library or not, so two independent ones run side by side too:
the ideal is what a perfect pipeline would gain over one process (M * P / (M + P - 1)) times what
two processes gain (``ceiling``) over the two that there are. ``work`` is the CPU time of all
processes for such a step, over that of one of the independent ones: others that use the cores
disturb it less than they do seconds.

``first``: seconds of the first call of a step function, beside those of a later one: what tracing,
partitioning and building the graph cost; ``plain_s`` is the first call of the plain step.

Everything is paired within a run; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

MICROBATCHES = 8
MICROBATCH_SIZE = 4
VOCABULARY = 128
HEAD_WIDTH = 64

L = tf.keras.layers
Step = Callable[[Any, Any], Any]
Partition = Callable[[int], AbstractContextManager[None]]


class Block(L.Layer):
    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = L.MultiHeadAttention(width // HEAD_WIDTH, HEAD_WIDTH)
        self.norms = [L.LayerNormalization(name=f"norm_{i}") for i in range(2)]
        self.wide, self.narrow = L.Dense(4 * width, "relu"), L.Dense(width)

    def build(self, input_shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norms[1](x)))


def make(base: Any, partition: Partition, options: argparse.Namespace) -> Any:
    """Returns a transformer, cut in halves by hand."""
    width, half = options.width, options.blocks // 2

    class Transformer(base):
        def __init__(self) -> None:
            super().__init__(name="transformer")
            self.embedding, self.head = L.Embedding(VOCABULARY, width), L.Dense(VOCABULARY)
            self.blocks = [Block(width, name=f"block_{i}") for i in range(options.blocks)]

        def call(self, tokens: Any) -> Any:
            with partition(0):
                x = self.embedding(tokens)
                for block in self.blocks[:half]:
                    x = block(x)
            with partition(1):
                for block in self.blocks[half:]:
                    x = block(x)
                return self.head(x)

    tf.keras.utils.set_random_seed(1)
    return Transformer()


def batch(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns tokens and those that follow."""
    shape = (MICROBATCHES * MICROBATCH_SIZE, options.length + 1)
    tokens = np.random.RandomState(1).randint(VOCABULARY, size=shape)
    return tf.constant(tokens[:, :-1]), tf.constant(tokens[:, 1:])


def loss_and_gradients(model: Any, x: Any, y: Any) -> Any:
    """Computes one microbatch."""
    with tf.GradientTape() as tape:
        crossentropy = tf.keras.losses.sparse_categorical_crossentropy
        loss = tf.reduce_mean(crossentropy(y, model(x), from_logits=True))
    return loss, tape.gradient(loss, model.trainable_variables)


def distributed(options: argparse.Namespace) -> Step:
    """Returns a training step of this library, without its optimizer."""
    model = make(smp.DistributedModel, smp.partition, options)

    @smp.step
    def compute(x: Any, y: Any) -> Any:
        return loss_and_gradients(model, x, y)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        loss, gradients = compute(x, y)
        return loss.reduce_mean(), [each.accumulate() for each in gradients]

    return step


def plain(options: argparse.Namespace) -> Step:
    """Returns the same step in plain TensorFlow, one microbatch after the other."""
    model = make(tf.keras.Model, lambda index: nullcontext(), options)
    model(tf.zeros([1, options.length], tf.int64))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        totals: list[Any] = []
        for part in range(MICROBATCHES):
            rows = slice(part * MICROBATCH_SIZE, (part + 1) * MICROBATCH_SIZE)
            with tf.control_dependencies(totals):
                loss, gradients = loss_and_gradients(model, x[rows], y[rows])
            dense = [tf.convert_to_tensor(each) / MICROBATCHES for each in (loss, *gradients)]
            totals = [a + b for a, b in zip(totals, dense, strict=True)] if totals else dense
        return totals[0], totals[1:]

    return step


def seconds(step: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Returns the mean time of a step whose first result is a loss, and its CPU time here."""
    start = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        step()[0].numpy()
    wall, cpu = start
    return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


def throughput(options: argparse.Namespace) -> dict[str, float]:
    """Compares the pipeline with one process, and with two independent ones."""
    x, y = batch(options)
    own, pipeline = plain(options), distributed(options)
    np.testing.assert_allclose(pipeline(x, y)[0], own(x, y)[0], rtol=1e-4)
    pipeline(x, y)
    rounds = []
    for _ in range(options.rounds):
        smp.barrier()
        alone, _ = seconds(lambda: own(x, y), 2) if smp.rank() == 0 else (0.0, 0.0)
        smp.barrier()
        together, independent = seconds(lambda: own(x, y), 2)
        smp.barrier()
        split, shared = seconds(lambda: pipeline(x, y), 2)
        smp.barrier()
        rounds.append(smp.allgather((alone, together, split, independent, shared), smp.WORLD))
    ranks = smp.size()
    ideal = MICROBATCHES * ranks / (MICROBATCHES + ranks - 1)
    rows = []
    for each in rounds:
        alone, together, split, *_ = (max(column) for column in zip(*each, strict=True))
        *_, independent, shared = (sum(column) for column in zip(*each, strict=True))
        ceiling = ranks * alone / together
        share = alone / split / (ideal * ceiling / ranks)
        work = shared / (independent / ranks)
        rows.append((alone, split, alone / split, ceiling, share, work))
    names = ("alone_s", "split_s", "speedup", "ceiling", "share_of_ideal", "work")
    medians = (statistics.median(column) for column in zip(*rows, strict=True))
    return dict(zip(names, medians, strict=True))


def first(options: argparse.Namespace) -> dict[str, float]:
    """Times the first call of a step function."""
    x, y = batch(options)
    found = []
    for _ in range(options.rounds):
        step = distributed(options)
        smp.barrier()
        calls = [seconds(lambda: step(x, y), 1)[0] for _ in range(3)]  # noqa: B023 - used at once
        own = plain(options)
        smp.barrier()
        found.append((calls[0], calls[2], seconds(lambda: own(x, y), 1)[0]))  # noqa: B023
    names = ("first_s", "later_s", "plain_s")
    medians = (statistics.median(column) for column in zip(*found, strict=True))
    return dict(zip(names, medians, strict=True))


def main() -> None:
    """Makes the measurements that the command line names."""
    measurements = {each.__name__: each for each in (throughput, first)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=measurements)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--blocks", type=int, default=4, help="of the model")
    parser.add_argument("--length", type=int, default=64, help="of a sequence, in tokens")
    options = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        # One core each, whatever the number of threads.
        cores = sorted(os.sched_getaffinity(0))
        local_rank = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
        tf.config.threading.set_intra_op_parallelism_threads(1)
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    for name in options.names:
        row = measurements[name](options)
        if smp.rank() == 0:
            row = {key: round(value, 3) for key, value in row.items()}
            print(json.dumps({"measured": name, "tensorflow": tf.__version__, **row}), flush=True)


if __name__ == "__main__":
    main()
