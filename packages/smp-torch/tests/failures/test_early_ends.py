"""A rank that ends in order, before the others, is noticed soon, whatever they wait for."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from launch_lines import launch_line

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

BODY = Path(__file__).parent / "early_job.py"
#: Far below the time-out of 60 s and the 5 s after which a rank closes its connections, on a busy
#: machine too.
BOUND_SECONDS = 5.0
CELLS = [
    *(("smprun", kind) for kind in ("tensor", "shards", "optimizer", "replicas")),
    ("torchrun", "tensor"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "kind"), CELLS)
def test_the_others_end_and_name_it(launcher: str, kind: str) -> None:
    job = subprocess.run(
        [*launch_line(launcher, 2), str(BODY), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,
        check=False,
    )
    seconds = time.time() - float(re.findall(r"LEFT (\S+)", job.stdout)[0])
    print(f"CELL {launcher} {kind}: {seconds:.1f} s, exit code {job.returncode}")
    assert job.returncode != 0, job.stdout
    assert "rank 1 has ended without it" in job.stdout, job.stdout
    assert seconds < BOUND_SECONDS, job.stdout
