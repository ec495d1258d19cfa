"""A notebook that is written for the service runs as it is, in both doors, to the same numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

NOTEBOOK = Path(__file__).with_name("notebook")
LAUNCH = "import sys; from smdistributed.modelparallel.launch.cli import main; sys.exit(main())"
#: Of both doors.
LOSSES: dict[str, list[str]] = {}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs smp-launch as somebody would who has installed it and nothing else."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, "--jobs", str(folder / "jobs"), *words],
        cwd=folder,
        env={
            **environ,
            "HOME": str(folder / "home"),
            "SMP_FILE_SYSTEMS": json.dumps({"fs-0123456789": str(folder)}),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("door", ["names", "sdk"])
def test_the_same_notebook_in_both_doors(tmp_path: Path, door: str) -> None:
    shutil.copytree(NOTEBOOK, tmp_path, dirs_exist_ok=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "fsx/test").mkdir(parents=True)
    (tmp_path / "fsx/test/held-out.pt").touch()
    words = ("--sdk",) if door == "sdk" else ()
    done = run(tmp_path, "run", *words, "--output", "done.ipynb", "model_parallel.ipynb")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "TCP" not in done.stderr
    named = "smp-launch: sagemaker names this machine in the notebook"
    assert (named in done.stderr) is (door == "names")
    assert "account 123456789012 bucket smp-launch" in said
    assert "['demo/train/inputs.pt']" in said
    assert "files of test: ['held-out.pt']" in said
    assert "status Completed" in said
    assert "answer (2, 1) float32" in said
    assert "equal True" in said
    assert "endpoints []" in said
    losses = re.findall(r"step \d+ loss: ([0-9.]+)", said)[:20]
    assert float(losses[-1]) < 0.1 * float(losses[0])
    LOSSES[door] = losses
    assert len({tuple(each) for each in LOSSES.values()}) == 1
    outputs = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    assert any("equal True" in json.dumps(cell.get("outputs")) for cell in outputs)
    # The bucket outlives the server: it is files.
    archives = list((tmp_path / "jobs/s3/smp-launch/demo/output").glob("*/output/model.tar.gz"))
    assert len(archives) == 1
    assert not list((tmp_path / "jobs/.serving/endpoints").iterdir())


def test_a_cell_that_fails_is_the_end(tmp_path: Path) -> None:
    cells = ["print('first')", "raise ValueError('planted')", "print('last')"]
    document = {
        "cells": [
            {
                "cell_type": "code",
                "id": f"c{index}",
                "metadata": {},
                "source": text,
                "outputs": [],
                "execution_count": None,
            }
            for index, text in enumerate(cells)
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "home").mkdir()
    (tmp_path / "bad.ipynb").write_text(json.dumps(document))
    done = run(tmp_path, "run", "--output", "kept.ipynb", "bad.ipynb")
    assert done.returncode == 2
    assert "first" in done.stdout
    assert "last" not in done.stdout
    assert "bad.ipynb: a cell failed: ValueError: planted" in done.stderr
    assert "first" in (tmp_path / "kept.ipynb").read_text()
    (tmp_path / "none.ipynb").write_text("{")
    done = run(tmp_path, "run", "none.ipynb")
    assert done.returncode == 2
    assert "none.ipynb must be a notebook" in done.stderr
