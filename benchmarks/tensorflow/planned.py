"""Plans beside what jobs take: a convolutional network and a transformer over two processes.

    python benchmarks/tensorflow/planned.py
    python benchmarks/tensorflow/planned.py --models transformer --rounds 3

Each model is planned for two cores of this host. Then each configuration runs as a plan prints it,
by turns with the others, and a row says what was planned and what was measured: the middle of the
steps of all rounds, and the largest memory of a rank. The memory of a process before its model,
and what the same layers take in small (graphs, not tensors), are taken off; the allocator has one
arena, since it keeps what is free for each thread. ``cpu_ms`` is the CPU time of the busier rank:
others that use the cores disturb it less than they do seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__)
MODELS = ("convolutions", "transformer")
#: Partitions, microbatches of a replica, schedule.
CONFIGURATIONS = (
    (1, 1, "interleaved"),
    (1, 4, "interleaved"),
    (2, 4, "interleaved"),
    (2, 4, "simple"),
)
WARM_UP, STEPS = 3, 6
MIB = 1 << 20


def resident(what: str) -> float:
    """Returns bytes of this process: VmRSS of now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(float(line.split()[1]) for line in lines if line.startswith(what))


def train(args: argparse.Namespace) -> None:
    """Trains a model for some steps, and prints what they took: a job's script."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"pipeline_parallel_degree": 1, "microbatches": 1})
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)

    class Block(layers.Layer):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = [layers.LayerNormalization() for _ in range(2)]
            self.attention = layers.MultiHeadAttention(max(1, width // 64), min(width, 64))
            self.up, self.down = layers.Dense(4 * width, "relu"), layers.Dense(width)

        def build(self, input_shape: Any) -> None:
            self.built = True

        def call(self, x: Any) -> Any:
            y = self.norms[0](x)
            x = x + self.attention(y, y, use_causal_mask=True)
            return x + self.down(self.up(self.norms[1](x)))

    class Transformer(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            width = 8 if args.small else 256
            self.embedding, self.head = layers.Embedding(1000, width), layers.Dense(1000)
            self.blocks = [Block(width) for _ in range(4)]

        def call(self, x: Any) -> Any:
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def convolutions() -> Any:
        width = 2 if args.small else 32
        parts = [layers.Conv2D(width, 3, padding="same", activation="relu") for _ in range(4)]
        ends = [layers.Flatten(), layers.Dense(8 * width, "relu"), layers.Dense(10)]
        return smp.DistributedModel(tf.keras.Sequential([layers.Input((32, 32, 3)), *parts, *ends]))

    random = np.random.RandomState(0)
    if args.train == "transformer":
        model, length = Transformer(), 8 if args.small else 128
        x = random.randint(1000, size=(args.batch, length))
        y = random.randint(1000, size=(args.batch, length))
    else:
        model = convolutions()
        x = random.rand(args.batch, 32, 32, 3).astype("float32")
        y = random.randint(10, size=args.batch)
    optimizer = tf.keras.optimizers.Adam()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @smp.step
    def gradients_of(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        gradients, loss = gradients_of(x, y)
        means = [smp.allreduce(tf.convert_to_tensor(each.accumulate())) for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    own = [tf.constant(each[smp.dp_rank() :: smp.dp_size()]) for each in (x, y)]
    before = resident("VmRSS")
    taken = []
    for _ in range(WARM_UP + STEPS):
        smp.barrier()
        begin, spent = time.perf_counter(), time.process_time()
        float(step(*own))
        taken.append((time.perf_counter() - begin, time.process_time() - spent))
    row = [*zip(*taken[WARM_UP:], strict=True)], resident("VmHWM") - before
    rows = smp.allgather(row, smp.WORLD)
    if smp.rank() == 0:
        seconds = [max(each) for each in zip(*(times[0] for times, _ in rows), strict=True)]
        cpu = max(statistics.median(times[1]) for times, _ in rows)
        memory = max(memory for _, memory in rows)
        print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": memory}), flush=True)


def program(model: str, batch: int, *, small: bool = False) -> list[str]:
    words = [str(HERE), "--train", model, "--batch", str(batch)]
    return [*words, "--small"] if small else words


def measured(words: list[str]) -> dict[str, Any]:
    """Runs a job; returns what its first rank prints."""
    command = [sys.executable, "-m", "smdistributed.modelparallel.common.launcher", *words]
    print(shlex.join(words), file=sys.stderr, flush=True)
    done = subprocess.run(
        command,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if '{"seconds"' in line]
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def rows_of(model: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Plans a model, runs its configurations, and returns a row for each."""
    from smdistributed.modelparallel.common.launcher.plan import recorded
    from smdistributed.modelparallel.common.search.candidates import Configuration
    from smdistributed.modelparallel.common.search.devices import Machine
    from smdistributed.modelparallel.common.search.ranking import Search

    profile = recorded(program(model, batch), os.environ)
    search = Search(profile, Machine.of("cpu", 2, memory="64GiB"))
    rows = []
    for partitions, microbatches, pipeline in CONFIGURATIONS:
        one = Configuration(partitions, 1, 2 // partitions, 1, False, microbatches, pipeline)
        estimate = search.estimate(one)
        settings = one.settings(profile)
        sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        rows.append(
            {
                "model": model,
                "settings": settings,
                "planned": estimate.seconds,
                "planned_bytes": estimate.peak.total,
                "words": ["-n", "2", *sets],
                "runs": [],
            }
        )
    small = program(model, 16, small=True)
    overheads: dict[int, float] = {}
    for row in rows:
        partitions = row["settings"]["pipeline_parallel_degree"]
        if partitions not in overheads:
            overheads[partitions] = measured([*row["words"], *small])["bytes"]
        row["overhead"] = overheads[partitions]
    for _ in range(rounds):
        for row in rows:
            row["runs"].append(measured([*row["words"], *program(model, batch)]))
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    seconds = statistics.median(each for run in row["runs"] for each in run["seconds"])
    cpu = statistics.median(run["cpu"] for run in row["runs"])
    num_bytes = max(run["bytes"] for run in row["runs"]) - row["overhead"]
    return {
        "model": row["model"],
        **row["settings"],
        "planned_ms": round(1e3 * row["planned"], 1),
        "measured_ms": round(1e3 * seconds, 1),
        "cpu_ms": round(1e3 * cpu, 1),
        "planned_mib": round(row["planned_bytes"] / MIB, 1),
        "measured_mib": round(num_bytes / MIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", choices=MODELS, help="what a job's script trains")
    parser.add_argument("--small", action="store_true", help="the same layers, in small")
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    for model in args.models:
        for row in rows_of(model, args.batch, args.rounds):
            print(json.dumps(shown(row)), flush=True)


if __name__ == "__main__":
    main()
