"""Runs an example as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1]
#: Where Python finds no TensorFlow: TensorBoard would import it, for seconds in each process.
WITHOUT_TENSORFLOW = Path(__file__).parent / "without_tensorflow"
#: A model and a text that take seconds, for both language models.
SMALL_LM = [
    *("--width", "48", "--layers", "4", "--heads", "4", "--context", "32", "--batch", "8"),
    *("--microbatches", "4", "--dropout", "0.1", "--validation-batches", "1"),
    *("--save-every", "3"),
]


def run(script: str, num_processes: int, *options: str) -> str:
    """Returns what an example printed, after it ended well."""
    command = [sys.executable, str(EXAMPLES / script)]
    if num_processes > 1:
        launcher = "smdistributed.modelparallel.common.launcher"
        command = [sys.executable, "-m", launcher, "-n", str(num_processes), *command[1:]]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if script.startswith("torch/"):
        search = [str(WITHOUT_TENSORFLOW), os.environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    done = subprocess.run(
        [*command, *options],
        env=environ,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
