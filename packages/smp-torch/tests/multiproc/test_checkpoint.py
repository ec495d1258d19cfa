"""Checkpoints: a killed job continues to the last bit, also under other degrees up to rounding."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_up import held_up
from small_nets import WIDTH, DropoutNet
from torch import nn
from torch.nn import functional as F
from world import Shape, compute_here, run_fresh, skip_without_devices

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.checkpoint import directory as checkpoint_directory
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.testing import Launcher, RanksFailedError

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

STEPS, SAVED = 12, 6
CONTENT = {"step": SAVED, "note": "text"}
TOLERANCE = 1e-6


@smp.step
def train_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def start(shape: tuple[int, int], seed: int) -> tuple[Any, Any]:
    pp, dp = shape
    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "ddp": dp > 1,
            "microbatches": 2,
            "communication_timeout": 20,
        }
    )
    compute_here()
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(seed + smp.rdp_rank())
    model = smp.DistributedModel(DropoutNet())
    # Two groups, in another order than the model's.
    parameters = list(model.parameters())
    groups = [{"params": parameters[::-2], "lr": 2e-2}, {"params": parameters[-2::-2]}]
    return model, smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=1e-2))


def train(model: Any, optimizer: Any, first: int, last: int) -> list[list[float]]:
    """Trains on numbers of every generator."""
    losses = []
    for _ in range(first, last):
        x = torch.randn(8, WIDTH) + random.random() + np.random.random()
        optimizer.zero_grad()
        output = train_step(model, x, x.roll(1, 1))
        optimizer.step()
        losses.append([loss.item() for loss in output.outputs])
    return losses


def train_until_killed(shape: tuple[int, int], folder: str) -> None:
    model, optimizer = start(shape, seed=0)
    losses = train(model, optimizer, 0, SAVED)
    wrapped = {"model": model, "optimizer": optimizer, "user_content": CONTENT}
    full = smp.save_checkpoint(folder, tag="full", partial=False, asynchronous=True, **wrapped)
    assert full is not None
    full.wait()
    with held_up(checkpoint_directory, "write_and_flush"):
        pending = smp.save_checkpoint(folder, tag=SAVED, asynchronous=True, **wrapped)
        states = model.state_dict(), optimizer.state_dict()
        if smp.rank() == 0:
            torch.save(states, f"{folder}/states")
        losses += train(model, optimizer, SAVED, STEPS)
    assert pending is not None
    pending.wait()
    Path(folder, f"losses.{smp.rank()}").write_bytes(pickle.dumps(losses))
    smp.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(shape: tuple[int, int], folder: str) -> Any:
    model, optimizer = start(shape, seed=7)  # other weights than those that come back
    assert smp.resume_from_checkpoint(folder) == CONTENT
    assert optimizer.param_groups[0]["lr"] == 2e-2
    generators = smp.allgather(torch.get_rng_state(), smp.PP_GROUP)
    assert all(torch.equal(each, generators[0]) for each in generators)
    return train(model, optimizer, SAVED, STEPS)


def states_after_resume(shape: tuple[int, int], folder: str, partial: bool) -> Any:
    model, optimizer = start(shape, seed=7)
    assert smp.resume_from_checkpoint(folder, partial=partial) == CONTENT
    with torch.no_grad():
        model.eval()
        smp.step(lambda model, x: model(x))(model, torch.ones(4, WIDTH))
    return model.state_dict(), optimizer.state_dict()


def run(shape: Shape, body: Any, *args: object) -> Any:
    # One shape over MPI, as users start it.
    launcher: Launcher = "smprun-fork" if shape == Shape(2) else "fork"
    return run_fresh(shape.num_ranks, body, tuple(shape), *args, launcher=launcher)


class Saved:
    """What killed jobs left behind, one job a shape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, shape: Shape) -> str:
        skip_without_devices(shape.num_ranks)
        folder = self._folder / f"{shape.pp}x{shape.dp}"
        if not folder.exists():
            folder.mkdir()
            with pytest.raises(RanksFailedError) as killed:
                run(shape, train_until_killed, str(folder))
            # The kill is the last thing that they do.
            assert (folder / "losses.0").exists(), killed.value
        return str(folder)

    def losses(self, shape: Shape) -> list[Any]:
        """Returns the losses of the undisturbed run, by rank."""
        folder = Path(self.folder(shape))
        return [
            pickle.loads((folder / f"losses.{rank}").read_bytes())
            for rank in range(shape.num_ranks)
        ]

    def states(self, shape: Shape) -> Any:
        return torch.load(f"{self.folder(shape)}/states", weights_only=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("checkpoints"))


def assert_equal(got: Any, expected: Any) -> None:
    """Two states have the same structure, order and bits."""
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_equal(got[key], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(got.cpu(), expected.cpu())
    else:
        assert got == expected


def sorted_states(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": dict(sorted(state["state"].items()))}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(1), marks=SLOW),
        Shape(2),
        pytest.param(Shape(4), marks=SLOW),
        Shape(2, 2),
    ],
)
def test_a_killed_job_continues_to_the_last_bit(saved: Saved, shape: Shape) -> None:
    expected = saved.losses(shape)
    for got, losses in zip(run(shape, resume, saved.folder(shape)), expected, strict=True):
        assert len(losses) == STEPS
        assert got == losses[SAVED:]


@pytest.mark.parametrize(
    ("shape", "other"),
    [
        (Shape(2), Shape(4)),
        (Shape(2), Shape(1)),
        pytest.param(Shape(1), Shape(2), marks=SLOW),
        (Shape(2, 2), Shape(1, 2)),
    ],
)
def test_a_job_of_another_degree_continues(saved: Saved, shape: Shape, other: Shape) -> None:
    expected = saved.losses(shape)
    if shape.dp > 1:
        expected = [expected[0], expected[2]]
    results = run(other, resume, saved.folder(shape))
    by_replica = [results[0], results[-1]][: other.dp]
    for got, losses in zip(by_replica, expected, strict=False):
        np.testing.assert_allclose(got, losses[SAVED:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("shape", "other", "partial"),
    [
        pytest.param(Shape(2), Shape(2), False, marks=SLOW),
        (Shape(2), Shape(1), False),
        (Shape(2), Shape(4), True),
        (Shape(2, 2), Shape(1), True),
        pytest.param(Shape(2), Shape(1, 2), True, marks=SLOW),
    ],
)
def test_model_and_optimizer_come_back(
    saved: Saved, shape: Shape, other: Shape, partial: bool
) -> None:
    model_state, optimizer_state = saved.states(shape)
    for got in run(other, states_after_resume, saved.folder(shape), partial):
        assert_equal(got[0], model_state)
        assert_equal(sorted_states(got[1]), sorted_states(optimizer_state))


EXPORT = """
import sys, torch
from small_nets import DropoutNet
folder = sys.argv[1]
model = DropoutNet()
parameters = list(model.parameters())
groups = [{"params": parameters[::-2], "lr": 1.0}, {"params": parameters[-2::-2]}]
optimizer = torch.optim.AdamW(groups)
model.load_state_dict(torch.load(f"{folder}/full", weights_only=True))
optimizer.load_state_dict(torch.load(f"{folder}/optimizer_full", weights_only=True))
assert not any(name.startswith("smdistributed") for name in sys.modules)
torch.save((dict(model.state_dict()), optimizer.state_dict()), sys.argv[2])
"""


def test_a_full_checkpoint_is_for_torch_alone(saved: Saved, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    subprocess.run(
        [sys.executable, "-c", EXPORT, saved.folder(Shape(2)), out],
        cwd=Path(__file__).parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=True,
        timeout=120,
    )
    model_state, optimizer_state = torch.load(out, weights_only=True)
    expected_model, expected_optimizer = saved.states(Shape(2))
    assert_equal(model_state, expected_model)
    assert_equal(sorted_states(optimizer_state), sorted_states(expected_optimizer))


def resume_elsewhere(shape: tuple[int, int], folder: str, partial_folder: str) -> str:
    """What a job alone can do with the files of others."""
    model, optimizer = start(shape, seed=0)
    content: dict[str, Any] = {"settings": argparse.Namespace(out=Path("x")), "shape": Shape(1)}
    smp.save_checkpoint(partial_folder, tag="b", model=model, user_content=content)
    assert smp.resume_from_checkpoint(partial_folder, tag="b") == content
    content["pattern"] = re.compile("x")
    with pytest.warns(UserWarning, match=r"re\._compile.*trust_pickle=True"):
        smp.save_checkpoint(partial_folder, tag="c", model=model, user_content=content)
    with pytest.raises(CheckpointError, match=r"re\._compile.*trust_pickle=True"):
        smp.resume_from_checkpoint(partial_folder, tag="c")
    assert smp.resume_from_checkpoint(partial_folder, tag="c", trust_pickle=True) == content
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert smp.resume_from_checkpoint(partial_folder, tag="c") == content

    # As the Trainer of Transformers does: a raw state, and an empty file beside it.
    torch.save(DropoutNet().state_dict(), f"{folder}/pytorch_model.bin")
    for name in ("user_content.pt", "user_content_pytorch_model.bin"):
        Path(folder, name).touch()
    raw = {"tag": "pytorch_model.bin", "partial": False}
    assert smp.resume_from_checkpoint(folder, load_optimizer=False, **raw) is None
    assert_equal(
        dict(model.state_dict()), torch.load(f"{folder}/pytorch_model.bin", weights_only=True)
    )
    torch.save({"other": torch.ones(1)}, f"{folder}/other.bin")
    with pytest.raises(RuntimeError, match=r"Missing key.*offset"):
        smp.resume_from_checkpoint(folder, tag="other.bin", partial=False)
    smp.resume_from_checkpoint(folder, tag="other.bin", partial=False, strict=False)

    # The former name of load_optimizer.
    smp.save_checkpoint(partial_folder, tag="d", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 5.0
    smp.resume_from_checkpoint(partial_folder, tag="d", load_optimizer_states=False)
    assert optimizer.param_groups[0]["lr"] == 5.0
    smp.resume_from_checkpoint(partial_folder, tag="d", load_optimizer_states=True)
    assert optimizer.param_groups[0]["lr"] == 2e-2
    with pytest.raises(TypeError, match=r"smp\.DistributedModel; received DropoutNet"):
        smp.save_checkpoint(partial_folder, tag="e", model=model.get_module())
    return "done"


def test_other_files_and_old_names(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("raw", "own")]
    Path(folders[0]).mkdir()
    assert run(Shape(1), resume_elsewhere, *folders) == ("done",)


def resume_another_model(shape: tuple[int, int], folder: str) -> str:
    start(shape, seed=0)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    model = smp.DistributedModel(other)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="another model") as raised:
            smp.resume_from_checkpoint(folder, model=model, strict=strict, load_optimizer=False)
        if not strict:
            break
        told = str(raised.value)
        model = smp.DistributedModel(DropoutNet(width=8))
    return told


def test_another_models_checkpoint_is_refused_on_every_rank(saved: Saved) -> None:
    folder = saved.folder(Shape(2))
    told = run(Shape(2), resume_another_model, folder)
    for each in told:
        assert "lacks 0.weight, 0.bias, 1.weight, 1.bias" in each
        assert "has besides offset, layers.0.0.weight" in each


def save_on_a_full_disk(shape: tuple[int, int], folder: str) -> str:
    """Rank 0 cannot write more than a few bytes; returns what is said."""
    model, optimizer = start(shape, seed=0)
    train(model, optimizer, 0, 1)
    if smp.rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as raised:
        smp.save_checkpoint(folder, 1, model=model, optimizer=optimizer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(raised.value)


def test_a_full_disk_is_named_on_every_rank(tmp_path: Path) -> None:
    for told in run(Shape(2), save_on_a_full_disk, str(tmp_path)):
        assert re.search(
            r"rank 0 on host \S+: OSError: \[Errno 27\] File too large: '.*/[a-z0-9_]+\.pt'", told
        )
    assert not list(tmp_path.glob("*"))


def damage(shape: tuple[int, int], folder: str) -> str:
    _kept_alive = start(shape, seed=0)
    if smp.rank() == 0:
        Path(folder, f"{SAVED}_partial", "optimizer_1_0.pt").write_bytes(b"x")
    smp.barrier()
    with pytest.raises(CheckpointError) as raised:
        smp.resume_from_checkpoint(folder)
    return str(raised.value)


def test_a_damaged_part_is_an_error_on_every_rank(saved: Saved, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", saved.folder(Shape(2)), str(tmp_path / "copy")], check=True)
    for message in run(Shape(2), damage, str(tmp_path / "copy")):
        assert "rank 1" in message
        assert "optimizer_1_0.pt" in message
