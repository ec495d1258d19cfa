"""How each launcher starts a script of these tests."""

from __future__ import annotations

import os
import sys

from smdistributed.modelparallel.common.launcher.command import find_mpirun


def launch_line(launcher: str, num_ranks: int) -> list[str]:
    """Returns the words before the script."""
    count = str(num_ranks)
    if launcher == "mpirun":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [str(find_mpirun()), *root, "--oversubscribe", "-n", count, sys.executable]
    if launcher == "torchrun":
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        return [sys.executable, "-m", *torchrun]
    return [sys.executable, "-m", "smdistributed.modelparallel.common.launcher", "-n", count]
