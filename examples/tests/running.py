"""Runs an example as a user does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from smdistributed.modelparallel.common.testing import fork_client

#: What a copy has imported already.
PRELOAD = (
    *("smdistributed.modelparallel.torch", "torch._dynamo", "torch.profiler"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"),
    *(["peft"] if importlib.util.find_spec("peft") else []),
)
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
    launcher = ["-m", "smdistributed.modelparallel.common.launcher", "-n", str(num_processes)]
    return _run(launcher if num_processes > 1 else [], script, options)


def run_by_torchrun(script: str, num_processes: int, *options: str) -> str:
    """The same, started by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    return _run([*launcher, "--nproc-per-node", str(num_processes)], script, options)


def run_copies(script: str, num_processes: int, *options: str) -> str:
    """The same, in copies of a process that has imported PyTorch and Transformers: sooner."""
    copied = f"--fork-from={fork_client.server_with(PRELOAD).address}"
    launcher = ["-m", "smdistributed.modelparallel.common.launcher", "-n", str(num_processes)]
    return _run([*launcher, copied], script, options)


def _run(launcher: Sequence[str], script: str, options: Sequence[str]) -> str:
    command = [sys.executable, *launcher, str(EXAMPLES / script)]
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
