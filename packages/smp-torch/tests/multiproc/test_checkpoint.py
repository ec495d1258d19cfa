"""Checkpoints: a new job continues to the last bit; what does not fit is refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

WIDTH = 16
STEPS, SAVED = 6, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2))
                for _ in range(4)
            )
        )
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x) + self.offset


@smp.step
def train_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def job(num_partitions: int, seed: int) -> tuple[Any, Any]:
    smp.init(
        {
            "pipeline_parallel_degree": num_partitions,
            "microbatches": 2,
            "communication_timeout": 20,
        }
    )
    torch.manual_seed(seed)
    model = smp.DistributedModel(Net())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(model: Any, optimizer: Any, first: int, last: int) -> list[list[float]]:
    losses = []
    for number in range(first, last):
        torch.manual_seed(100 + number)
        optimizer.zero_grad()
        output = train_step(model, torch.randn(8, WIDTH), torch.randn(8, WIDTH))
        optimizer.step()
        losses.append([loss.item() for loss in output.outputs])
    return losses


def train_and_save(folder: str) -> Any:
    model, optimizer = job(2, seed=0)
    losses = train(model, optimizer, 0, SAVED)
    content = {"step": SAVED, "note": "text"}
    smp.save_checkpoint(
        folder, tag=SAVED, partial=True, model=model, optimizer=optimizer, user_content=content
    )
    smp.save_checkpoint(folder, tag="full", partial=False, model=model, user_content=content)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses += train(model, optimizer, SAVED, STEPS)
    smp.save({"rank": smp.pp_rank()}, f"{folder}/own", partial=True)
    smp.save({"rank": smp.pp_rank()}, f"{folder}/three", partial=True, v3=True)
    if smp.rank() == 0:
        smp.save(torch.ones(2), f"{folder}/whole.pt", partial=False)
    smp.barrier()
    assert smp.load(f"{folder}/own") == {"rank": smp.pp_rank()}
    assert smp.load(f"{folder}/three") == {"rank": smp.pp_rank()}
    assert torch.equal(smp.load(f"{folder}/whole.pt", partial=False), torch.ones(2))
    return losses, state


def resume(folder: str) -> Any:
    model, optimizer = job(2, seed=7)  # other weights than those that come back
    content = smp.resume_from_checkpoint(folder, partial=True)
    assert content == {"step": SAVED, "note": "text"}
    return train(model, optimizer, SAVED, STEPS), model.state_dict()


def resume_full(folder: str) -> Any:
    model, _ = job(2, seed=7)
    content = smp.resume_from_checkpoint(folder, tag="full", partial=False)
    assert content == {"step": SAVED, "note": "text"}
    with torch.no_grad():
        model.eval()
        smp.step(lambda model, x: model(x))(model, torch.ones(4, WIDTH))
    return model.state_dict()


def resume_alone(folder: str) -> str:
    _model, _ = job(1, seed=7)
    with pytest.raises(CheckpointError) as raised:
        smp.resume_from_checkpoint(folder, partial=True)
    return str(raised.value)


def trust(folder: str) -> None:
    model, _ = job(1, seed=0)
    content = {"path": Path("x")}
    smp.save_checkpoint(folder, tag="c", partial=True, model=model, user_content=content)
    with pytest.raises(CheckpointError, match="trust_pickle=True"):
        smp.resume_from_checkpoint(folder, tag="c")
    assert smp.resume_from_checkpoint(folder, tag="c", trust_pickle=True) == content


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, run_ranks(2, train_and_save, timeout=60, args=[folder]).results


def test_a_new_job_continues_to_the_last_bit(saved: Any) -> None:
    folder, results = saved
    resumed = run_ranks(2, resume, timeout=60, args=[folder]).results
    for (losses, _), (after, _) in zip(results, resumed, strict=True):
        assert len(losses) == STEPS
        assert after == losses[SAVED:]


def test_a_full_checkpoint_is_the_plain_state(saved: Any) -> None:
    folder, ((_, state), _) = saved
    loaded = torch.load(Path(folder, "full"), weights_only=True)
    torch.manual_seed(0)
    plain = Net()
    plain.load_state_dict(loaded, strict=True)
    assert list(loaded) == list(plain.state_dict()) == list(state)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_full_checkpoint_is_resumed(saved: Any) -> None:
    folder, ((_, state), _) = saved
    for got in run_ranks(2, resume_full, timeout=60, args=[folder]).results:
        assert got.keys() == state.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in state.items())


def test_another_degree_is_refused_with_both_named(saved: Any) -> None:
    folder, _ = saved
    (message,) = run_ranks(1, resume_alone, launcher="python", timeout=60, args=[folder]).results
    assert re.search(r"pipeline_parallel_degree 2, this job has 1", message), message


def test_files_of_save_are_named_by_rank(saved: Any) -> None:
    names = set(os.listdir(saved[0]))
    assert {"own_0", "own_1", "three_0_0_0", "three_1_0_0", "whole.pt"} <= names


def test_other_classes_need_trust(tmp_path: Path) -> None:
    run_ranks(1, trust, launcher="python", timeout=60, args=[str(tmp_path)])
