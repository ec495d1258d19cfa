"""Fine-tune a causal language model of Hugging Face, split over processes.

    python examples/torch/fine_tune.py                              # one process
    smprun -n 2 examples/torch/fine_tune.py                         # two halves of the model
    smprun -n 4 examples/torch/fine_tune.py                         # two replicas of two halves
    torchrun --nproc-per-node 2 examples/torch/fine_tune.py         # without MPI
    smprun -n 2 examples/torch/fine_tune.py --split slices          # tensor parallelism
    smprun -n 2 examples/torch/fine_tune.py --split shards          # sharded data parallelism

    pip install 'smp-torch[examples]'     # transformers; for --lora also peft

The text is what Python's ``help()`` knows of the language, which is on every machine that has
Python. A small Llama and its tokenizer are made in the folder, so that nothing is downloaded;
``--model`` takes a folder or a name of your own. ``--lora 8`` trains adapters of that rank alone.
``output`` holds the result as ``save_pretrained`` writes it, for Transformers or peft alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import smdistributed.modelparallel.torch as smp

END = "<|end|>"


def make_base(folder: Path) -> None:
    """Writes a small Llama with random weights, and a tokenizer of the text, as a hub has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def sequences(tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Returns the text in rows of ``length`` tokens, in an order of its own."""
    text = END.join(topics.values())
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def batches(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yields this replica's share of each batch, over and over."""
    while True:
        for batch in rows.split(size):
            if len(batch) == size:
                yield batch[smp.dp_rank() :: smp.dp_size()]


@smp.step
def train_step(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Computes the loss and its gradients for one mini-batch."""
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    model.backward(loss)
    return loss


@smp.step
def evaluation_step(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Computes the loss alone."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def mean_over_replicas(output: smp.StepOutput) -> float:
    """Returns the mean of a loss over microbatches and replicas."""
    losses = smp.allgather(output.reduce_mean().item(), smp.DP_GROUP)
    return sum(losses) / len(losses)


def perplexity(model: smp.DistributedModel, rows: torch.Tensor, size: int) -> float:
    """Returns exp of the mean loss over rows that training does not see."""
    model.eval()
    with torch.no_grad():
        found = [
            mean_over_replicas(evaluation_step(model, batch))
            for batch in itertools.islice(batches(rows, size), len(rows) // size)
        ]
    model.train()
    return math.exp(sum(found) / len(found))


def load(source: str | Path, lora_rank: int | None) -> torch.nn.Module:
    """Returns the model to train: the whole one, or one whose adapters alone train."""
    net: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(source)
    if lora_rank is None:
        return net
    import peft

    return peft.get_peft_model(net, peft.LoraConfig(r=lora_rank, target_modules="all-linear"))


def configuration(args: argparse.Namespace) -> dict[str, object]:
    """Returns what ``smp.init`` is told: how the processes share the model."""
    num_processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    degree = args.degree or min(2, num_processes)
    return {
        {
            "layers": "pipeline_parallel_degree",
            "slices": "tensor_parallel_degree",
            "shards": "sharded_data_parallel_degree",
        }[args.split]: degree,
        "microbatches": args.microbatches,
        "ddp": True,
        "bf16": True,
        "delayed_parameter_initialization": True,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a causal language model of Hugging Face.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", help="a folder, or a name on the hub (default: a small Llama)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, of all replicas")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--split", choices=["layers", "slices", "shards"], default="layers")
    parser.add_argument("--degree", type=int, help="processes a model (default: 2, or 1 if alone)")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank alone"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--folder", type=Path, default=Path("runs/fine_tune"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    transformers.utils.logging.disable_progress_bar()
    smp.init(configuration(args))
    source = args.model or args.folder / "base"
    if args.model is None and smp.rank() == 0:
        make_base(source)
    smp.barrier()

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)  # adapters are drawn alike on every rank
    slices = smp.tensor_parallelism(args.split == "slices", auto=True)
    with slices, smp.delay_param_initialization():
        net = load(source, args.lora)
    model = smp.DistributedModel(net)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=args.learning_rate))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, args.steps)
    rows = sequences(tokenizer, args.length)
    held_out, rows = rows[: 4 * args.batch], rows[4 * args.batch :]

    for step, tokens in enumerate(itertools.islice(batches(rows, args.batch), args.steps), 1):
        optimizer.zero_grad()
        loss = mean_over_replicas(train_step(model, tokens))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)  # the norm over all ranks
        optimizer.step()
        schedule.step()
        if smp.rank() == 0 and step % max(1, args.steps // 6) == 0:
            print(f"step {step}/{args.steps}  loss {loss:.4f}", flush=True)
    found = perplexity(model, held_out, args.batch)

    state = model.state_dict(gather_to_rank0=True)
    if smp.rank() == 0:
        print(f"perplexity {found:.3f} on {len(held_out)} sequences that it has not seen")
        model.get_module().save_pretrained(args.folder / "output", state_dict=state)
        tokenizer.save_pretrained(args.folder / "output")
        print(f"saved: {args.folder / 'output'}", flush=True)


if __name__ == "__main__":
    main()
