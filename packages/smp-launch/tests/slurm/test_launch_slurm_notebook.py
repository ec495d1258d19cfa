"""The same job through Slurm: the losses of this machine, for the notebook and over two nodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from notebook_bench import DOORS, NOTEBOOK, losses_of_notebook
from slurm_cluster import cluster

from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import Session

__all__ = ["cluster"]

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]


def strategy(ranks: int) -> dict[str, Any]:
    parameters = {"partitions": 2, "microbatches": 4, "pipeline": "interleaved"}
    return {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
        "mpi": {"enabled": True, "processes_per_host": ranks},
    }


def losses_of_job(folder: Path, backend: str, nodes: int) -> list[str]:
    """Trains the notebook's model over two ranks; returns the losses."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    torch.save(torch.linspace(-1, 1, 64).reshape(8, 8), data / "inputs.pt")
    estimator = PyTorch(
        entry_point="train.py",
        source_dir=str(NOTEBOOK / "code"),
        instance_count=nodes,
        distribution=strategy(2 // nodes),
        hyperparameters={"steps": 20},
        sagemaker_session=Session(root=folder / "jobs", backend=backend),
    )
    estimator.fit({"train": str(data), "test": str(data)}, logs=False)
    assert estimator.latest_training_job is not None
    job = estimator.sagemaker_session.job(estimator.latest_training_job.name)
    return re.findall(r"step \d+ loss: ([0-9.]+)", (job.logs / "algo-1.log").read_text())


def test_two_nodes_have_the_losses_of_this_machine(tmp_path: Path) -> None:
    here = losses_of_job(tmp_path, "local", 1)
    there = losses_of_job(tmp_path, "slurm", 2)
    assert len(here) == 20
    assert there == here
    print(*here)


@pytest.mark.parametrize("door", DOORS)
def test_the_notebook_as_it_is_through_slurm(tmp_path: Path, door: str) -> None:
    here = losses_of_job(tmp_path, "local", 1)
    # The notebook names a host with GPUs, which these nodes do not have.
    there = losses_of_notebook(
        tmp_path, door, SMP_BACKEND="slurm", SMP_SLURM_OPTIONS='{"*": "--gres=none"}'
    )
    assert there == here
    scripts = list((tmp_path / "jobs").glob("SMD-MP-demo-*/slurm-job"))
    assert len(scripts) == 1, "the job of the notebook is one of Slurm's"
