"""From nothing to a notebook that runs: an empty environment, what the documentation says, a door.

pip itself, our packages built from their sources as they are published, what else the registry has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_bench import losses_of_notebook

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[4]
PACKAGES = ("smp-common", "smp-torch", "smp-launch")
_LIMIT_SECONDS = 1200
LOSSES: dict[str, list[str]] = {}


def call(*words: str | Path) -> None:
    """Runs a command that succeeds, with nothing of this environment."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    environ = {name: text for name, text in os.environ.items() if name not in left_out}
    done = subprocess.run(
        list(map(str, words)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with what the page about notebooks says, and no more."""
    place = tmp_path_factory.mktemp("fresh")
    call(sys.executable, "-m", "venv", place / "environment")
    python = place / "environment/bin/python"
    pip = (python, "-m", "pip")
    sources = [REPOSITORY / "packages" / name for name in PACKAGES]
    call(*pip, "wheel", "--no-deps", "--wheel-dir", place / "wheels", *sources)
    call(python, REPOSITORY / "tools/install_torch.py")
    common, torch, launch = (
        str(next((place / "wheels").glob(f"{name.replace('-', '_')}-*.whl"))) for name in PACKAGES
    )
    call(*pip, "install", common, torch, f"{launch}[notebooks,api,serve]")
    return python


# The SDK comes with the second door: the first one needs none.
@pytest.mark.parametrize("door", ["names", "sdk"])
def test_a_fresh_install_runs_the_notebook(environment: Path, tmp_path: Path, door: str) -> None:
    if door == "sdk":
        call(environment, "-m", "pip", "install", "sagemaker<3")
    command = (str(environment.with_name("smp-launch")),)
    # No more of a path than a login shell has: the environment is not activated.
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ""}
    LOSSES[door] = losses_of_notebook(tmp_path, door, command, **variables)
    assert len({tuple(each) for each in LOSSES.values()}) == 1
    print(door, *LOSSES[door])
