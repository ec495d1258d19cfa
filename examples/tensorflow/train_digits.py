"""Train a convolutional network on scanned digits, split over two processes.

    smprun -n 2 examples/tensorflow/train_digits.py
    python examples/tensorflow/train_digits.py --evaluate runs/train_digits/model

    pip install 'smp-tf[examples]'        # scikit-learn, tensorboard and rich

The 1,797 images ship with scikit-learn. The first command trains, with a checkpoint after each
epoch (interrupted and started again, it goes on), and writes the whole model; the second one loads
it with TensorFlow alone. With four processes there are two replicas of two partitions each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits

import smdistributed.modelparallel.tensorflow as smp
from smdistributed.modelparallel.common.planning import report

layers = tf.keras.layers
NUM_TEST = 297


def digits() -> tuple[Any, Any, Any, Any]:
    """Returns images of shape [N, 8, 8, 1] in 0..1 and their digits: for training and for tests."""
    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.images))
    images = (data.images[order] / 16.0).astype("float32")[..., np.newaxis]
    labels = data.target[order].astype("int64")
    return images[:-NUM_TEST], labels[:-NUM_TEST], images[-NUM_TEST:], labels[-NUM_TEST:]


def dataset(images: Any, labels: Any, batch: int, seed: int) -> tf.data.Dataset:
    """Returns the share of this replica, shuffled; every rank of the replica gets the same."""
    rank, size = smp.dp_rank(), smp.dp_size()
    own = tf.data.Dataset.from_tensor_slices((images[rank::size], labels[rank::size]))
    shuffled = own.shuffle(len(images), seed=seed + rank)
    return shuffled.batch(batch // size, drop_remainder=True)


class DigitNet(smp.DistributedModel):
    """Convolutions on partition 0, the dense layers on partition 1, where one splits by hand."""

    def __init__(self, is_manual: bool) -> None:
        super().__init__(name="digit_net")
        self.is_manual = is_manual
        self.convolutions = [layers.Conv2D(16, 3, padding="same", name=f"conv_{i}") for i in (0, 1)]
        self.norms = [layers.BatchNormalization(name=f"norm_{i}") for i in (0, 1)]
        self.pool, self.flat = layers.MaxPooling2D(), layers.Flatten()
        self.hidden = layers.Dense(64, activation="relu")
        self.dropout = layers.Dropout(0.3, seed=1)
        self.classes = layers.Dense(10)

    def place(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Returns the context of a partition."""
        return smp.partition(index) if self.is_manual else contextlib.nullcontext()

    def call(self, images: Any, training: Any = None) -> Any:
        with self.place(0):
            x = images
            for convolution, norm in zip(self.convolutions, self.norms, strict=True):
                x = tf.nn.relu(norm(convolution(x), training=training))
            x = self.flat(self.pool(x))
        with self.place(1):
            return self.classes(self.dropout(self.hidden(x), training=training))


def evaluate(folder: str) -> None:
    """Loads a written model with TensorFlow alone, and prints how often it is right."""
    _, _, images, labels = digits()
    model = tf.saved_model.load(folder)
    logits = model.serve(tf.constant(images))
    right = np.mean(logits.numpy().argmax(axis=1) == labels)
    print(f"reloaded: {right:.4f} of {len(labels)} test images are recognised", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a convolutional network on scanned digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=50, help="images a step, over all replicas")
    parser.add_argument("--microbatches", type=int, default=5)
    parser.add_argument("--pipeline", type=int, help="partitions (default: 2, or 1 if alone)")
    parser.add_argument("--partition", choices=["manual", "auto"], default="manual")
    parser.add_argument("--horovod", action="store_true", help="reduce gradients with Horovod")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/train_digits"))
    parser.add_argument("--evaluate", metavar="MODEL", help="only load this model and test it")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.evaluate:
        evaluate(args.evaluate)
        return
    num_processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    degree = args.pipeline or min(2, num_processes)
    is_manual = args.partition == "manual" and degree == 2
    smp.init(
        {
            "partitions": degree,
            "microbatches": args.microbatches,
            "auto_partition": not is_manual,
            "default_partition": 0,
            "horovod": args.horovod,
        }
    )
    tf.keras.utils.set_random_seed(args.seed)
    images, labels, test_images, test_labels = digits()
    model = DigitNet(is_manual)
    optimizer = tf.keras.optimizers.Adam(args.learning_rate)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @smp.step
    def gradients_of(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def logits_of(images: Any) -> Any:
        return model(images, training=False)

    @tf.function
    def train_step(images: Any, labels: Any) -> Any:
        gradients, loss = gradients_of(images, labels)
        means = [smp.allreduce(each.accumulate()) for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return smp.allreduce(loss.reduce_mean())

    epoch = tf.Variable(0, trainable=False)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
    manager = smp.CheckpointManager(checkpoint, args.folder / "checkpoints", max_to_keep=2)
    resumed = manager.restore()
    # The number of the checkpoint is that of the epoch; the variable has it after the first step.
    first = int(resumed.rsplit("-", maxsplit=1)[1]) if resumed else 0

    is_shown = smp.rank() == 0
    board = tf.summary.create_file_writer(str(args.folder / "tensorboard")) if is_shown else None
    steps = len(images) // args.batch
    console = Console()
    bar = Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not (is_shown and console.is_terminal),
    )
    if is_shown and resumed:
        console.print(f"resumed after epoch {first}")
    task = bar.add_task("", total=steps * (args.epochs - first), epoch=first, text="")
    with bar:
        for number in range(first + 1, args.epochs + 1):
            begin, losses = time.monotonic(), []
            for batch in dataset(images, labels, args.batch, seed=1000 * number):
                losses.append(float(train_step(*batch)))
                bar.update(task, advance=1, epoch=number, text=f"loss {losses[-1]:.4f}")
            epoch.assign(number)
            manager.save(checkpoint_number=number)
            logits = logits_of(tf.constant(test_images)).merge().numpy()
            right = float(np.mean(logits.argmax(axis=1) == test_labels))
            if board is not None:
                seconds = time.monotonic() - begin
                console.print(
                    f"epoch {number}/{args.epochs}  loss {np.mean(losses):.4f}  "
                    f"right {right:.4f}  {seconds:.1f} s"
                )
                with board.as_default(step=number):
                    tf.summary.scalar("loss/train", np.mean(losses))
                    tf.summary.scalar("accuracy/test", right)
                    board.flush()
    if first >= args.epochs:
        if is_shown:
            console.print(f"{first} epochs are done already; use --epochs for more.")
        return
    model.save_model(args.folder / "model")
    own = {id(each) for each in model.local_variables}  # layers know all of theirs
    held = [layer.name for layer in model.layers if own & {id(each) for each in layer.weights}]
    for rank, names in enumerate(smp.allgather(held, smp.WORLD)):
        if is_shown and degree > 1:
            console.print(f"rank {rank} holds {', '.join(names)}")
    if is_shown:
        if degree > 1:
            picture = args.folder / "timeline.svg"
            timeline, title = gradients_of.timeline(), "A step, as planned"
            picture.write_text(report.timeline_svg(timeline, title))
            picture.with_suffix(".json").write_text(report.timeline_json(timeline, title))
            console.print(f"a picture of a step: {picture}")
        console.print(f"the whole model: {args.folder / 'model'}")


if __name__ == "__main__":
    main()
