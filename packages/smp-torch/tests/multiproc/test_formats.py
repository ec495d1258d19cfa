"""Models and optimizers in the formats of others: written here and read there, and back."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensor_transformers
import torch
from held_up import held_up
from torch import nn
from torch.distributed.checkpoint import filesystem
from world import pipeline, replicas, run, run_fresh, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CheckpointError, CommError
from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

SHARDS = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 2,
    "sdp_gradient_clipping": float("inf"),
}
SLICES = {"tensor_parallel_degree": 2}
WORLDS = {
    "pp2": pipeline(2, 2, launcher="fork"),
    "pp2-sdp2": replicas(2, 2, 2, **SHARDS),
    "sdp2": replicas(2, 1, 2, **SHARDS),
    "owners": replicas(2, 2, 2, shard_optimizer_state=True),
    "owners-bf16": replicas(2, 1, 2, shard_optimizer_state=True, bf16=True),
    "pp2-sdp2-bf16": replicas(2, 2, 2, bf16=True, **SHARDS),
    "tp2-sdp2": world_of(4, {"microbatches": 2, "ddp": True, **SLICES, **SHARDS}),
}
#: Smaller than any of the models, larger than most of their tensors.
FILE_BYTES = 6000
#: Without the small divisors by which Adam makes much of roundings.
ADAM = {"lr": 1e-2, "eps": 1e-3}


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
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), **ADAM))


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

    own = model.get_module()
    with pytest.raises(CommError, match=r"save_pretrained.*which every rank calls"):
        own.save_pretrained(folder) if smp.rank() == 0 else smp.barrier()
    smp.barrier()
    own.save_pretrained(str(Path(folder, "own")), max_shard_size=FILE_BYTES)
    smp.barrier()
    again = transformers.AutoModelForCausalLM.from_pretrained(str(Path(folder, "own")))
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    named = json.loads(Path(folder, "own", "model.safetensors.index.json").read_text())
    assert named["weight_map"].keys() == index["weight_map"].keys()

    with held_up(package, "save_file"):
        pending = smp.save_checkpoint(
            folder,
            "behind",
            partial=False,
            model=model,
            format="safetensors",
            max_shard_size_bytes=FILE_BYTES,
            asynchronous=True,
        )
        going_on = train(model, optimizer, 2, 3)
    assert pending is not None
    pending.wait()
    for file in {*index["weight_map"].values(), "model.safetensors.index.json"}:
        assert Path(folder, "behind", file).read_bytes() == (final / file).read_bytes(), file
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


# --------------------------------------------------------------- torchdata


def loader_there_and_back(folder: str, workers: int) -> None:
    """Goes on in the middle of an epoch, each replica with batches of its own."""
    package: Any = importlib.import_module("torchdata.stateful_dataloader")

    def made(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        order = torch.Generator().manual_seed(seed + smp.dp_rank())
        rows = torch.arange(24.0)[:, None]
        loader = package.StatefulDataLoader(
            rows, batch_size=4, shuffle=True, generator=order, num_workers=workers
        )
        return model, optimizer, loader

    def seen(model: Any, optimizer: Any, batches: Any) -> list[Any]:
        found = []
        for rows in batches:
            optimizer.zero_grad()
            loss = square_step(model, rows / 24).reduce_mean().item()
            optimizer.step()
            found.append((rows.flatten().tolist(), loss))
        return found

    model, optimizer, loader = made(0)
    epoch = iter(loader)
    seen(model, optimizer, itertools.islice(epoch, 2))
    content = {"loaders": smp.allgather(loader.state_dict(), smp.DP_GROUP)}
    tag = f"workers-{workers}"
    smp.save_checkpoint(folder, tag, model=model, optimizer=optimizer, user_content=content)
    later = seen(model, optimizer, epoch)
    assert [len(rows) for rows, _ in later] == [4] * 4
    everyones = smp.allgather([rows for rows, _ in later], smp.DP_GROUP)
    assert everyones[0] != everyones[1]

    model, optimizer, loader = made(7)
    content = smp.resume_from_checkpoint(folder, tag, model=model, optimizer=optimizer)
    loader.load_state_dict(content["loaders"][smp.dp_rank()])
    assert seen(model, optimizer, loader) == later


@smp.step
def square_step(model: Any, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows).square().mean()
    model.backward(loss)
    return loss


def test_a_stateful_loader_goes_on_with_a_checkpoint(worlds: Worlds, tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        run(worlds, WORLDS["pp2-sdp2"], loader_there_and_back, str(tmp_path), workers)


# --------------------------------------------------------------- torch.distributed.checkpoint

SAVED, LATER, END = 2, 4, 6
#: Ways of jobs of PyTorch alone to write the state of an optimizer.
KINDS = ("named", "numbered", "flat")


def fsdp_job(family: str, folder: str, resumed: list[str]) -> dict[str, Any]:
    """Trains by FSDP2 and saves; or resumes what jobs of this library saved; returns losses."""
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    # Not by an address: two processes do not meet by one with letters beyond ASCII.
    store = torch.distributed.FileStore(str(Path(folder, f"store-{len(resumed)}")), 2)
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    flat = states.StateDictOptions(flatten_optimizer_state_dict=True)

    def built(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = getattr(tensor_transformers, family)()
        for layer in net.transformer.h if family == "gpt2" else net.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net, torch.optim.AdamW(net.parameters(), **ADAM)

    def losses(net: Any, optimizer: Any, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last):
            optimizer.zero_grad()
            loss = net(input_ids=batch(step), labels=batch(step), use_cache=False).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    if not resumed:
        net, optimizer = built(0)
        losses(net, optimizer, 0, SAVED)
        saved = {
            "named": states.get_optimizer_state_dict(net, optimizer),
            "numbered": optimizer.state_dict(),
            "flat": states.get_optimizer_state_dict(net, optimizer, options=flat),
        }
        for kind in KINDS:
            model = states.get_model_state_dict(net)
            dcp.save({"model": model, "optimizer": saved[kind]}, checkpoint_id=f"{folder}/{kind}")
        return {"going on": losses(net, optimizer, SAVED, LATER)}
    gone_on = {}
    for name in resumed:
        net, optimizer = built(7)
        model, state = states.get_state_dict(net, optimizer)
        wanted = {"model": model, "optimizer": state}
        dcp.load(wanted, checkpoint_id=f"{folder}/{name}_partial")
        states.set_state_dict(
            net, optimizer, model_state_dict=model, optim_state_dict=wanted["optimizer"]
        )
        gone_on[name] = losses(net, optimizer, LATER, END)
    return gone_on


def dcp_there_and_back(family: str, folder: str, name: str, kind: str) -> dict[str, Any]:
    """Resumes what FSDP2 saved, saves for it, and resumes that itself, delayed."""
    model, optimizer = build(family, seed=7)
    assert smp.resume_from_checkpoint(folder, kind) is None
    losses = train(model, optimizer, SAVED, LATER)
    with held_up(filesystem.FileSystemWriter, "write_data"):
        smp.save_checkpoint(
            folder,
            name,
            model=model,
            optimizer=optimizer,
            user_content=LATER,
            format="dcp",
            asynchronous=True,
        )
        later = train(model, optimizer, LATER, END)
    other, other_optimizer = build(family, seed=8, delayed=True)
    resumed = smp.resume_from_checkpoint(folder, name, model=other, optimizer=other_optimizer)
    assert resumed == LATER
    assert train(other, other_optimizer, LATER, END) == later
    return {"resumed": losses, "later": later}


def dcp_of_other_degrees(folder: str, name: str) -> list[float]:
    """Resumes in shards what a pipeline saved; another model is refused with what differs."""
    model, optimizer = build("gpt2", seed=7)
    assert smp.resume_from_checkpoint(folder, name) == LATER
    found = train(model, optimizer, LATER, END)
    other = smp.DistributedModel(tensor_transformers.gpt2(n_layer=3))
    with pytest.raises(CheckpointError, match=r"it lacks transformer\.h\.2\."):
        smp.resume_from_checkpoint(folder, name, model=other)
    with pytest.raises(ValueError, match="pass partial=True and the model; received partial=False"):
        smp.save_checkpoint(folder, "x", model=model, partial=False, format="dcp")
    return found


def dcp_through_half(folder: str, name: str) -> None:
    """Takes what FSDP2 saved in fp32 through a job of half precision, to the last bit."""
    utils: Any = importlib.import_module("torch.distributed.checkpoint.format_utils")
    model, optimizer = build("gpt2", seed=7)
    smp.resume_from_checkpoint(folder, "named")
    train_step(model, batch(0))  # which places the partitions
    smp.save_checkpoint(folder, name, model=model, optimizer=optimizer, format="dcp")
    if smp.rank() != 0:
        return
    found = []
    for each in ("named", f"{name}_partial"):
        utils.dcp_to_torch_save(f"{folder}/{each}", f"{folder}/{name}.pt")
        found.append(torch.load(f"{folder}/{name}.pt", weights_only=True))
    theirs, ours = found
    assert ours["model"].keys() == theirs["model"].keys()
    assert ours["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    for key, value in theirs["model"].items():
        assert value.dtype is torch.float32
        assert torch.equal(ours["model"][key], value), key
    for key, values in theirs["optimizer"]["state"].items():
        for kind, value in values.items():
            assert torch.equal(ours["optimizer"]["state"][key][kind], value), (key, kind)
    settings = [dict(each["optimizer"]["param_groups"][0]) for each in found]
    assert set(settings[0].pop("params")) == set(settings[1].pop("params"))
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        pytest.param(
            "gpt2",
            {"pp2": KINDS, "pp2-sdp2": KINDS[:1], "owners": KINDS[:1]},
            marks=pytest.mark.slow,
        ),
        ("llama", {"tp2-sdp2": KINDS[:1], "pp2": KINDS[1:2]}),
    ],
)
def test_fsdp2_goes_on_from_ours_and_we_from_its(
    worlds: Worlds, family: str, names: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", minversion="5")
    folder = str(tmp_path)
    theirs = run_fresh(2, fsdp_job, family, folder, [])[0]["going on"]
    later = {}
    for world, kinds in names.items():
        for kind in kinds:
            name = f"{world}-{kind}"
            for found in run(worlds, WORLDS[world], dcp_there_and_back, family, folder, name, kind):
                assert found["resumed"] == pytest.approx(theirs, rel=1e-5)
                later[name] = found["later"]
    if family == "gpt2":
        for losses in run(worlds, WORLDS["sdp2"], dcp_of_other_degrees, folder, "pp2-named"):
            assert losses == pytest.approx(later["pp2-named"], rel=1e-5)
    for world in ("owners-bf16", "pp2-sdp2-bf16") if family == "gpt2" else ():
        run(worlds, WORLDS[world], dcp_through_half, folder, world)
    for name, losses in run_fresh(2, fsdp_job, family, folder, list(later))[0].items():
        assert losses == pytest.approx(later[name], rel=1e-5), name
