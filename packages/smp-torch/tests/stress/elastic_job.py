"""A script that goes on from its newest checkpoint, with as many replicas as it is started with.

Usage: elastic_job.py FOLDER PARAMETERS. It trains until there is a file ``stop`` in the folder,
saves after each step, and notes what it does in ``log.<rank>``; see ``lose_hosts.py``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZE, GLOBAL_BATCH, WIDTH = 120, 24, 8
STEPS_AN_EPOCH = SIZE // GLOBAL_BATCH
LEARNING_RATE = 1e-2


def samples() -> torch.Tensor:
    """Returns the data set. Shape: (SIZE, WIDTH)."""
    return torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net() -> nn.Module:
    """Returns the model, with the same weights each time."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).double()


def error(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a batch."""
    return (output - x.roll(1, 1)).square().mean()


def main(folder: Path, parameters: dict[str, Any]) -> None:
    """Trains; each process of the job."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    import smdistributed.modelparallel.torch as smp

    smp.init({"microbatches": 2, "ddp": True, "communication_timeout": 60, **parameters})
    whole = net()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(whole, True)
    model = smp.DistributedModel(whole)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))

    @smp.step
    def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = error(model(x), x)
        model.backward(loss)
        return loss

    data = samples()
    sampler = smp.ElasticSampler(range(SIZE), seed=3)
    loader = StatefulDataLoader(
        range(SIZE), batch_size=GLOBAL_BATCH // smp.dp_size(), sampler=sampler
    )
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (folder / f"log.{smp.rank()}").open("a", buffering=1) as log:

        def note(what: str, step: int, **more: Any) -> None:
            print(json.dumps({"attempt": attempt, "what": what, "step": step, **more}), file=log)

        step = 0
        if (folder / "checkpoints" / "newest").exists():
            content = smp.resume_from_checkpoint(folder / "checkpoints")
            step = content["step"]
            loader.load_state_dict(content["loader"])
        note("start", step, size=smp.size(), replicas=smp.dp_size())
        is_over = False
        while not is_over:
            sampler.set_epoch(step // STEPS_AN_EPOCH)
            for indices in loader:
                optimizer.zero_grad()
                loss = train_step(model, data[indices]).reduce_mean().item()
                optimizer.step()
                step += 1
                if smp.pp_rank() == 0:
                    note("loss", step, loss=loss, indices=indices.tolist(), of=smp.dp_rank())
                content = {"step": step, "loader": loader.state_dict()}
                note("saving", step)
                smp.save_checkpoint(
                    folder / "checkpoints",
                    step,
                    model=model,
                    optimizer=optimizer,
                    user_content=content,
                    num_kept_partial_checkpoints=2,
                )
                note("saved", step)
                is_over = any(smp.allgather((folder / "stop").exists(), smp.WORLD))
                if is_over:
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
