"""Runs one notebook that is written for the service, by either door, and says what it must give."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NOTEBOOK = Path(__file__).with_name("notebook")
LIMIT_SECONDS = 280
#: What smp-launch is where it is installed in this Python.
HERE = (
    *(sys.executable, "-c"),
    "import sys; from smdistributed.modelparallel.launch.cli import main; sys.exit(main())",
)
DOORS = ("names", "sdk")
_LOSS = re.compile(r"step \d+ loss: ([0-9.]+)")


def run(
    folder: Path, *words: str, command: Sequence[str] = HERE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs smp-launch as somebody would who has installed it and nothing else."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    (folder / "home").mkdir(exist_ok=True)
    return subprocess.run(
        [*command, "--jobs", str(folder / "jobs"), *words],
        cwd=folder,
        env={
            **environ,
            "HOME": str(folder / "home"),
            "SMP_FILE_SYSTEMS": json.dumps({"fs-0123456789": str(folder)}),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def losses_of_notebook(
    folder: Path, door: str, command: Sequence[str] = HERE, **variables: str
) -> list[str]:
    """Runs the notebook in a folder, checks all that it gives, and returns the losses."""
    shutil.copytree(NOTEBOOK, folder, dirs_exist_ok=True)
    (folder / "fsx/test").mkdir(parents=True)
    (folder / "fsx/test/held-out.pt").touch()
    words = ("run", *(["--sdk"] if door == "sdk" else []), "--output", "done.ipynb")
    done = run(folder, *words, "model_parallel.ipynb", command=command, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "TCP" not in done.stderr
    named = "smp-launch: sagemaker names this machine in the notebook"
    assert (named in done.stderr) is (door == "names")
    role = "arn:aws:iam::123456789012:role/local"
    assert f"account 123456789012 bucket smp-launch role {role}" in said
    assert "['demo/train/inputs.pt']" in said
    assert "files of test: ['held-out.pt']" in said
    assert "status Completed" in said
    assert "answer (2, 1) float32" in said
    assert "equal True" in said
    assert "endpoints []" in said
    losses = _LOSS.findall(said)[:20]
    assert len(losses) == 20
    assert float(losses[-1]) < 0.1 * float(losses[0])
    outputs = json.loads((folder / "done.ipynb").read_text())["cells"]
    assert any("equal True" in json.dumps(cell.get("outputs")) for cell in outputs)
    # The bucket outlives the server: it is files.
    archives = list((folder / "jobs/s3/smp-launch/demo/output").glob("*/output/model.tar.gz"))
    assert len(archives) == 1
    assert not list((folder / "jobs/.serving/endpoints").iterdir())
    return losses
