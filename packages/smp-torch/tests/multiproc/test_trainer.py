"""The Trainer of Transformers, unchanged, over two partitions: the numbers of one process."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.testing import run_ranks


def _major(name: str) -> int:
    try:
        return int(importlib.metadata.version(name).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


IS_NEWER = _major("transformers") >= 5
WEIGHTS = "model.safetensors" if IS_NEWER else "pytorch_model.bin"
pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (_major("transformers") and _major("accelerate")),
        reason="needs transformers, accelerate",
    ),
]

STEPS, SAVED, ACCUMULATED = 8, 4, 2
TOLERANCE = 1e-5
#: What a launcher sets; without the key "partitions" the Trainer leaves model parallelism off.
LAUNCH = {
    "SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2, "microbatches": 2, "ddp": False}),
    "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
}
PLAIN = {"SM_HP_MP_PARAMETERS": None, "SM_FRAMEWORK_PARAMS": None}


def _run(architecture: str, folder: Path, *, resumes: bool, plain: bool) -> list[dict[str, Any]]:
    job = importlib.import_module("trainer_bodies").job  # which imports transformers
    arguments = [architecture, str(folder), STEPS, SAVED, resumes]
    if plain:
        outcome = run_ranks(1, job, launcher="python", timeout=250, env=PLAIN, args=arguments)
    else:
        outcome = run_ranks(2, job, timeout=250, env=LAUNCH, args=arguments)
    return list(outcome.results)


def _assert_same(got: dict[str, Any], want: dict[str, Any], resumed: bool = False) -> None:
    losses = want["losses"][SAVED * ACCUMULATED if resumed else 0 :]
    assert got["losses"] == pytest.approx(losses, rel=0, abs=TOLERANCE)
    assert got["norms"] == pytest.approx(want["norms"], rel=0, abs=TOLERANCE)
    # Those of before the checkpoint come back with the state of the Trainer.
    assert got["evaluations"] == pytest.approx(want["evaluations"], rel=0, abs=TOLERANCE)
    assert got["evaluation"] == pytest.approx(want["evaluation"], rel=0, abs=TOLERANCE)
    torch.testing.assert_close(got["predictions"], want["predictions"], rtol=0, atol=1e-4)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".bin":
        return dict(torch.load(path, weights_only=True))
    return dict(importlib.import_module("safetensors.torch").load_file(path))


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_trains_evaluates_saves_and_resumes(architecture: str, tmp_path: Path) -> None:
    (plain,) = _run(architecture, tmp_path / "plain", resumes=False, plain=True)
    assert len(plain["losses"]) == STEPS * ACCUMULATED
    assert min(plain["norms"]) > 0.1
    assert plain["losses"][-1] < plain["losses"][0]
    for split in _run(architecture, tmp_path / "split", resumes=False, plain=False):
        _assert_same(split, plain)

    checkpoint = tmp_path / "split" / f"checkpoint-{SAVED}"
    files = {path.name for path in checkpoint.iterdir()}
    assert {WEIGHTS, "user_content.pt", "optimizer.pt_0", "optimizer.pt_1"} <= files
    assert not (checkpoint / "user_content.pt").stat().st_size
    for resumed in _run(architecture, tmp_path / "split", resumes=True, plain=False):
        _assert_same(resumed, plain, resumed=True)

    saved, expected = (_weights(tmp_path / each / "final" / WEIGHTS) for each in ("split", "plain"))
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-4)
