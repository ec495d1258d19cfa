"""The Trainer of Transformers, unchanged: the numbers of one process, however it is split."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
from collections.abc import Callable
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
#: What a launcher sets besides ``SM_HP_MP_PARAMETERS``, without whose key "partitions" the Trainer
#: leaves model parallelism off.
LAUNCH = {
    "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
}
PLAIN = {"SM_HP_MP_PARAMETERS": None, "SM_FRAMEWORK_PARAMS": None}


def _run(
    architecture: str, folder: Path, *, resumes: bool, degrees: dict[str, Any] | None
) -> list[dict[str, Any]]:
    job = importlib.import_module("trainer_bodies").job  # which imports transformers
    arguments = [architecture, str(folder), STEPS, SAVED, resumes]
    if degrees is None:
        outcome = run_ranks(1, job, launcher="python", timeout=250, env=PLAIN, args=arguments)
    else:
        launch = {**LAUNCH, "SM_HP_MP_PARAMETERS": json.dumps({"microbatches": 2, **degrees})}
        outcome = run_ranks(2, job, timeout=250, env=launch, args=arguments)
    return list(outcome.results)


#: What one process finds for an architecture, and its folder.
Plainly = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plainly:
    """Returns what one process finds for an architecture, and its folder; trained once."""

    @functools.cache
    def train(architecture: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("plain")
        (found,) = _run(architecture, folder, resumes=False, degrees=None)
        assert len(found["losses"]) == STEPS * ACCUMULATED
        assert min(found["norms"]) > 0.1
        assert found["losses"][-1] < found["losses"][0]
        return found, folder

    return train


def _assert_same(
    got: dict[str, Any], want: dict[str, Any], resumed: bool = False, predicts: bool = True
) -> None:
    losses = want["losses"][SAVED * ACCUMULATED if resumed else 0 :]
    assert got["losses"] == pytest.approx(losses, rel=0, abs=TOLERANCE)
    assert got["norms"] == pytest.approx(want["norms"], rel=0, abs=TOLERANCE)
    # Those of before the checkpoint come back with the state of the Trainer.
    assert got["evaluations"] == pytest.approx(want["evaluations"], rel=0, abs=TOLERANCE)
    assert got["evaluation"] == pytest.approx(want["evaluation"], rel=0, abs=TOLERANCE)
    if predicts:
        torch.testing.assert_close(got["predictions"], want["predictions"], rtol=0, atol=1e-4)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".bin":
        return dict(torch.load(path, weights_only=True))
    return dict(importlib.import_module("safetensors.torch").load_file(path))


def _assert_same_weights(folder: Path, plain: Path) -> None:
    saved, expected = (_weights(each / "final" / WEIGHTS) for each in (folder, plain))
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_trains_evaluates_saves_and_resumes(
    plain: Plainly, architecture: str, tmp_path: Path
) -> None:
    want, folder = plain(architecture)
    degrees = {"partitions": 2, "ddp": False}
    for split in _run(architecture, tmp_path, resumes=False, degrees=degrees):
        _assert_same(split, want)

    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    files = {path.name for path in checkpoint.iterdir()}
    assert {WEIGHTS, "user_content.pt", "optimizer.pt_0", "optimizer.pt_1"} <= files
    assert not (checkpoint / "user_content.pt").stat().st_size
    for resumed in _run(architecture, tmp_path, resumes=True, degrees=degrees):
        _assert_same(resumed, want, resumed=True)
    _assert_same_weights(tmp_path, folder)


@pytest.mark.skipif(not IS_NEWER, reason="that of Transformers 4 makes its optimizer itself")
@pytest.mark.parametrize(
    ("architecture", "degrees", "predicts"),
    [
        ("bert", {"tensor_parallel_degree": 2, "prescaled_batch": True}, True),
        # Replicas are given the same batches, and predict as if these were different ones.
        ("gpt2", {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.1}, False),
    ],
    ids=["slices", "shards"],
)
def test_trains_where_ranks_have_parts_of_parameters(
    plain: Plainly, architecture: str, degrees: dict[str, Any], predicts: bool, tmp_path: Path
) -> None:
    want, folder = plain(architecture)
    degrees = {"partitions": 1, "ddp": True, **degrees}
    for found in _run(architecture, tmp_path, resumes=False, degrees=degrees):
        _assert_same(found, want, predicts=predicts)
    _assert_same_weights(tmp_path, folder)
