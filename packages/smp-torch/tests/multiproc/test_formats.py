"""Models and optimizers in the formats of others: written here and read there, and back."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensor_transformers
import torch
from world import pipeline, replicas, run, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 2}
SLICES = {"tensor_parallel_degree": 2}
WORLDS = {
    "pp2": pipeline(2, 2, launcher="fork"),
    "pp2-sdp2": replicas(2, 2, 2, **SHARDS),
    "tp2-sdp2": world_of(4, {"microbatches": 2, "ddp": True, **SLICES, **SHARDS}),
}
#: Smaller than any of the models, larger than most of their tensors.
FILE_BYTES = 6000


@smp.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.backward(loss)
    return loss


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(tensor_transformers.VOCAB, (4, 8), generator=generator)


def build(family: str, *, seed: int, delayed: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    delay = smp.delay_param_initialization() if delayed else contextlib.nullcontext()
    with delay, smp.tensor_parallelism(auto=family != "gpt2"):
        net = getattr(tensor_transformers, family)()
    model = smp.DistributedModel(net)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        losses.append(train_step(model, batch(step)).reduce_mean().item())
        optimizer.step()
    return losses


# --------------------------------------------------------------- folders of Transformers


def safetensors_there_and_back(family: str, folder: str) -> None:
    """Saves a model in training, opens it in plain Transformers, and resumes the folder."""
    transformers: Any = importlib.import_module("transformers")
    package: Any = importlib.import_module("safetensors.torch")
    model, optimizer = build(family, seed=0)
    train(model, optimizer, 0, 2)
    with mock.patch.object(package, "save_file", wraps=package.save_file) as save_file:
        smp.save_checkpoint(
            folder,
            "final",
            partial=False,
            model=model,
            format="safetensors",
            max_shard_size_bytes=FILE_BYTES,
        )
    written = [sum(each.nbytes for each in call.args[0].values()) for call in save_file.mock_calls]
    whole = model.state_dict()
    largest = max(FILE_BYTES, *(each.nbytes for each in whole.values()))
    assert max(written, default=0) <= largest, written
    is_translated = bool(model.translation)
    place = smp.pp_rank(), smp.dp_rank()
    assert bool(written) == (smp.rank() == 0 if is_translated else place[1] == 0)

    final = Path(folder, "final")
    index = json.loads((final / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(final))
    expected = model.translation.to_theirs(whole) if is_translated else whole
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name]), name
    names = {id(each): name for name, each in plain.named_parameters(remove_duplicate=False)}
    assert len(index["weight_map"]) == len(names), "tied weights are there once"

    going_on = train(model, optimizer, 2, 3)
    for delayed in (False, True):
        other, _ = build(family, seed=7, delayed=delayed)
        # What Transformers writes by itself is found without a tag.
        where = (folder, "final") if delayed else (str(final), None)
        smp.resume_from_checkpoint(*where, partial=False, model=other)
        assert train_step(other, batch(2)).reduce_mean().item() == pytest.approx(going_on[0])
    smp.barrier()
    if smp.rank() == 0:
        (final / index["weight_map"]["lm_head.weight" if family == "llama" else FIRST]).unlink()
    smp.barrier()
    with pytest.raises(CheckpointError, match="is missing"):
        smp.resume_from_checkpoint(folder, "final", partial=False, model=other)
    with pytest.raises(ValueError, match="pass partial=False and the model alone"):
        smp.save_checkpoint(folder, "x", model=model, format="safetensors")


FIRST = "transformer.wte.weight"


@pytest.mark.parametrize(
    ("world", "family"),
    [("pp2", "gpt2"), ("pp2-sdp2", "llama"), ("tp2-sdp2", "llama"), ("tp2-sdp2", "gpt2")],
)
def test_a_folder_of_transformers(worlds: Worlds, world: str, family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    run(worlds, WORLDS[world], safetensors_there_and_back, family, str(tmp_path))
