"""Train a byte-level language model on the source code of Python's standard library.

    smprun -n 2 examples/tensorflow/train_lm.py

    pip install 'smp-tf[examples]'        # scikit-learn, tensorboard and rich

The same model, text and windows as the PyTorch example; two processes hold half of it each. Started
with one process (``python examples/tensorflow/train_lm.py``) the same command gives the same
losses. Interrupted and started again, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import smdistributed.modelparallel.tensorflow as smp

NUM_BYTES = 256
layers = tf.keras.layers


class Block(layers.Layer):
    """One transformer block, layer norms first."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        super().__init__(name=f"block_{number}")
        self.norm_1, self.norm_2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(args.heads, args.width // args.heads)
        self.up = layers.Dense(4 * args.width, activation="gelu")
        self.down = layers.Dense(args.width)
        self.drops = [layers.Dropout(args.dropout, seed=2 * number + i) for i in (0, 1)]

    def build(self, input_shape: Any) -> None:
        self.built = True

    def call(self, x: Any, training: Any = None) -> Any:
        y = self.norm_1(x)
        y = self.attention(y, y, use_causal_mask=True)
        x = x + self.drops[0](y, training=training)
        return x + self.drops[1](self.down(self.up(self.norm_2(x))), training=training)


class ByteGPT(smp.DistributedModel):
    """A GPT over bytes; the output layer has the weights of the embedding."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(name="byte_gpt")
        self.bytes = layers.Embedding(NUM_BYTES, args.width)
        self.positions = layers.Embedding(args.context, args.width)
        self.blocks = [Block(args, number) for number in range(args.layers)]
        self.norm = layers.LayerNormalization()

    def call(self, tokens: Any, training: Any = None) -> Any:
        x = self.bytes(tokens) + self.positions(tf.range(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, training=training)
        return tf.matmul(self.norm(x), self.bytes.embeddings, transpose_b=True)


def read_standard_library() -> tuple[bytes, bytes]:
    """Returns the text to train on and, every twentieth file, the text to validate on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.relative_to(folder).parts)
    )
    train = b"".join(path.read_bytes() for i, path in enumerate(files) if i % 20)
    return train, b"".join(path.read_bytes() for path in files[::20])


class Batches:
    """Random windows of a text; batch i is the same whatever the number of processes is."""

    def __init__(self, text: bytes, batch: int, context: int, seed: int) -> None:
        self.text = np.frombuffer(text, dtype=np.uint8)
        self.batch, self.context, self.seed = batch, context, seed

    def __call__(self, index: int) -> tuple[Any, Any]:
        """Returns the inputs and targets of this replica."""
        random = np.random.RandomState(self.seed + index)
        last = len(self.text) - self.context - 1
        starts = random.randint(last, size=self.batch)[smp.dp_rank() :: smp.dp_size()]
        windows = self.text[starts[:, None] + np.arange(self.context + 1)].astype("int64")
        return tf.constant(windows[:, :-1]), tf.constant(windows[:, 1:])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, all replicas")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--pipeline", type=int, help="partitions (default: 2, or 1 if alone)")
    parser.add_argument("--schedule", choices=["interleaved", "simple"], default="interleaved")
    parser.add_argument("--context", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation-batches", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("runs/train_lm_tensorflow"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    num_processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    smp.init(
        {
            "pipeline_parallel_degree": args.pipeline or min(2, num_processes),
            "microbatches": args.microbatches,
            "pipeline": args.schedule,
        }
    )
    tf.keras.utils.set_random_seed(args.seed)
    model = ByteGPT(args)
    optimizer = tf.keras.optimizers.Adam(args.learning_rate, beta_2=0.95)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @smp.step
    def gradients_of(tokens: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(tokens, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def validation_loss(tokens: Any, targets: Any) -> Any:
        return loss_of(targets, model(tokens, training=False))

    @tf.function
    def train_step(tokens: Any, targets: Any) -> Any:
        gradients, loss = gradients_of(tokens, targets)
        # Sums of slices (of the embedding) become dense, as Adam of one process has them.
        means = [smp.allreduce(tf.convert_to_tensor(each.accumulate())) for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return smp.allreduce(loss.reduce_mean())

    text, validation_text = read_standard_library()
    batches = Batches(text, args.batch, args.context, seed=args.seed * 1_000_003)
    validation = Batches(validation_text, args.batch, args.context, seed=1_000_000_007)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = smp.CheckpointManager(checkpoint, args.folder / "checkpoints", max_to_keep=2)
    resumed = manager.restore()
    first = int(resumed.rsplit("-", maxsplit=1)[1]) if resumed else 0

    is_shown = smp.rank() == 0
    board = tf.summary.create_file_writer(str(args.folder / "tensorboard")) if is_shown else None
    console = Console()
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not (is_shown and console.is_terminal),
    )
    if is_shown:
        console.print(
            f"{smp.pp_size()} partition(s), {smp.dp_size()} replica(s); {len(text):,} bytes"
            + (f"; resumed at step {first}" if first else "")
        )
    task = bar.add_task("", total=args.steps, completed=first, text="building the graph")
    with bar:
        for step in range(first + 1, args.steps + 1):
            begin = time.monotonic()
            loss = float(train_step(*batches(step)))
            speed = args.batch * args.context / (time.monotonic() - begin)
            shown = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
            bar.update(task, completed=step, text=shown)
            if board is not None:
                if bar.disable and step % max(1, args.steps // 20) == 0:
                    print(f"step {step}/{args.steps}  {shown}", flush=True)
                with board.as_default(step=step):
                    tf.summary.scalar("loss/train", loss)
            if step % args.save_every == 0 or step == args.steps:
                manager.save(checkpoint_number=step)
    if first >= args.steps:
        if is_shown:
            console.print(f"{first} steps are done already; use --steps for more.")
        return
    losses = [
        float(smp.allreduce(validation_loss(*validation(number)).reduce_mean()))
        for number in range(args.validation_batches)
    ]
    if board is not None:
        board.close()
        zlib_bits = 8 * len(zlib.compress(validation_text, 9)) / len(validation_text)
        console.print(
            f"validation: {np.mean(losses) / math.log(2):.3f} bits per byte; "
            f"zlib needs {zlib_bits:.3f} for the same text"
        )


if __name__ == "__main__":
    main()
