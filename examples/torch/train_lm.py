"""Train a byte-level language model on the source code of Python's standard library.

    smprun -n 2 examples/torch/train_lm.py

    pip install 'smp-torch[examples]'     # tensorboard and rich

The text is on every machine that has Python. Two processes hold half of the model each; started
with one process (``python examples/torch/train_lm.py``) the same command gives the same losses.
Interrupt it whenever you like: started again, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.planning import report

NUM_BYTES = 256


class Block(nn.Module):
    """One transformer block, layer norms first."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (
            part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class ByteGPT(nn.Module):
    """A GPT over bytes; the output layer shares its weight with the embedding, unless untied."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(
            Block(args.width, args.heads, args.dropout) for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, NUM_BYTES, bias=False)
        if not args.untied:
            self.head.weight = self.bytes.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def hugging_face_model(args: argparse.Namespace) -> nn.Module:
    """Builds an architecture of Transformers, by its name there, with random weights."""
    import transformers

    config = transformers.AutoConfig.for_model(
        args.hugging_face,
        vocab_size=NUM_BYTES,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        intermediate_size=4 * args.width,
        max_position_embeddings=args.context,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config)


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
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch, self.context, self.seed = batch, context, seed

    def __call__(self, index: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the inputs and targets of data-parallel rank ``rank`` of ``size``."""
        generator = torch.Generator().manual_seed(self.seed + index)
        last = len(self.text) - self.context - 1
        starts = torch.randint(last, (self.batch,), generator=generator)[rank::size]
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss in nats per byte."""
    output = model(tokens)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@smp.step
def train_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Computes the loss and its gradients for one mini-batch."""
    loss = loss_of(model, tokens, targets)
    model.backward(loss)
    return loss


@smp.step
def validation_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Computes the loss alone."""
    return loss_of(model, tokens, targets)


def mean_over_replicas(output: smp.StepOutput) -> float:
    """Returns the mean of a loss over microbatches and data-parallel ranks."""
    losses = smp.allgather(output.reduce_mean().item(), smp.DP_GROUP)
    return sum(losses) / len(losses)


def validate(model: nn.Module, batches: Batches, num_batches: int, device: torch.device) -> float:
    """Returns bits per byte on the validation text."""
    model.eval()
    losses = []
    with torch.no_grad():
        for index in range(num_batches):
            tokens, targets = batches(index, smp.dp_rank(), smp.dp_size())
            output = validation_step(model, tokens.to(device), targets.to(device))
            losses.append(mean_over_replicas(output))
    model.train()
    return sum(losses) / len(losses) / math.log(2)


def bits_per_byte_of_zlib(text: bytes) -> float:
    """Returns what zlib needs for the same text, at its best level."""
    return 8 * len(zlib.compress(text, 9)) / len(text)


class Display:
    """Shows progress: a bar on a terminal, else a line now and then. Only rank 0 shows anything."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self.num_steps = num_steps
        self.every = max(1, num_steps // 20)
        self.is_shown = smp.rank() == 0
        self.started, self.first_step = time.monotonic(), first_step
        self.bar: Progress | None = None
        console = Console()
        if self.is_shown and console.is_terminal:
            self.bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task("", total=num_steps, completed=first_step, text="")
            self.bar.start()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Shows one step's loss (nats per byte) and speed."""
        text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, text=text)
        elif self.is_shown and (step % self.every == 0 or step == self.num_steps):
            done = step - self.first_step
            left = (time.monotonic() - self.started) / done * (self.num_steps - step)
            print(f"step {step}/{self.num_steps}  {text}  {left:.0f} s left", flush=True)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        elif self.is_shown:
            print(text, flush=True)

    def close(self) -> None:
        """Stops the bar."""
        if self.bar is not None:
            self.bar.stop()


def write_reports(model: smp.DistributedModel, folder: Path) -> None:
    """Draws where the model's parts are and how the last step ran."""
    timeline = train_step.timeline()
    if smp.rank() != 0:
        return
    assignment = model.placement.assignment
    (folder / "partition.svg").write_text(report.partition_svg(assignment))
    (folder / "timeline.svg").write_text(
        report.timeline_svg(timeline, "One training step, as measured")
    )
    print(report.partition_text(assignment))
    # The same for Perfetto (ui.perfetto.dev).
    (folder / "timeline.json").write_text(
        report.timeline_json(timeline, "One training step, as measured")
    )
    print(report.timeline_text(timeline))
    print(f"pictures: {folder / 'partition.svg'}, {folder / 'timeline.svg'}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch", type=int, default=16, help="sequences a step, over all processes"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--pipeline", type=int, help="partitions (default: 2, or 1 if alone)")
    parser.add_argument("--schedule", choices=["interleaved", "simple"], default="interleaved")
    parser.add_argument("--context", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument(
        "--hugging-face", metavar="NAME", help="gpt2, llama, ...: needs transformers"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation-batches", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("runs/train_lm"), help="for results")
    parser.add_argument("--fresh", action="store_true", help="ignore checkpoints in the folder")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    num_processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    smp.init(
        {
            "pipeline_parallel_degree": args.pipeline or min(2, num_processes),
            "microbatches": args.microbatches,
            "pipeline": args.schedule,
            "ddp": True,
        }
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    device = (
        torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(args.seed)
    net = hugging_face_model(args) if args.hugging_face else ByteGPT(args)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer.optimizer, lambda step: min(1.0, (step + 1) / 20)
    )
    train_text, validation_text = read_standard_library()
    batches = Batches(train_text, args.batch, args.context, seed=args.seed * 1_000_003)
    validation = Batches(validation_text, args.batch, args.context, seed=1)

    first = 0
    checkpoints = args.folder / "checkpoints"
    if (checkpoints / "newest").exists() and not args.fresh:
        resumed = smp.resume_from_checkpoint(checkpoints)
        first = resumed["step"]
        warm_up.load_state_dict(resumed["warm_up"])
        torch.set_rng_state(resumed["random_state"])
    args.folder.mkdir(parents=True, exist_ok=True)
    board = SummaryWriter(args.folder / "tensorboard") if smp.rank() == 0 else None
    display = Display(args.steps, first)
    num_parameters = sum(each.numel() for each in net.parameters())
    display.say(
        f"{num_parameters:,} parameters on {smp.pp_size()} partition(s), {smp.dp_size()} "
        f"replica(s); {len(train_text):,} bytes to train on"
        + (f"; resumed at step {first}" if first else "")
    )

    for step in range(first + 1, args.steps + 1):
        begin = time.monotonic()
        tokens, targets = batches(step, smp.dp_rank(), smp.dp_size())
        optimizer.zero_grad()
        loss = mean_over_replicas(train_step(model, tokens.to(device), targets.to(device)))
        optimizer.step()
        warm_up.step()
        speed = args.batch * args.context / (time.monotonic() - begin)
        display.step(step, loss, speed)
        if board is not None:
            board.add_scalar("loss/train", loss, step)
            board.add_scalar("speed/tokens_per_second", speed, step)
        if step % args.save_every == 0 or step == args.steps:
            smp.save_checkpoint(
                checkpoints,
                step,
                model=model,
                optimizer=optimizer,
                user_content={
                    "step": step,
                    "warm_up": warm_up.state_dict(),
                    "random_state": torch.get_rng_state(),
                },
                num_kept_partial_checkpoints=2,
            )

    if first < args.steps:
        bits = validate(model, validation, args.validation_batches, device)
        display.close()
        if board is not None:
            board.add_scalar("bits_per_byte/validation", bits, args.steps)
        if smp.rank() == 0:
            print(
                f"validation: {bits:.3f} bits per byte; zlib needs "
                f"{bits_per_byte_of_zlib(validation_text):.3f} for the same text",
                flush=True,
            )
        if smp.pp_size() > 1:
            write_reports(model, args.folder)
    else:
        display.close()
        display.say(f"{args.steps} steps are done already; use --steps or --fresh for more.")
    if board is not None:
        board.close()


if __name__ == "__main__":
    main()
