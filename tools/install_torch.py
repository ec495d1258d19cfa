"""Installs PyTorch into the environment that runs this script: the CPU build where no GPU is.

The registry's plain ``torch`` brings gigabytes of CUDA libraries. Set ``SMP_TORCH`` to a pip
requirement (``SMP_TORCH='torch==2.11.*'``) to install that instead.

Usage: ``python tools/install_torch.py [version]``
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

#: What CI tests, and what the sessions install that name no other.
VERSION = "2.13.0"


def pip_install(*requirements: str) -> bool:
    """Installs with pip; returns whether it succeeded."""
    # Python compiles what it imports, which is a small part of PyTorch.
    flags = ("--quiet", "--no-compile")
    command = [sys.executable, "-m", "pip", "install", *flags, *requirements]
    return subprocess.run(command, check=False).returncode == 0


def install(version: str) -> bool:
    """Installs torch of this version; returns whether it succeeded."""
    if chosen := os.environ.get("SMP_TORCH"):
        return pip_install(chosen)
    if shutil.which("nvidia-smi"):
        return pip_install(f"torch=={version}")
    # A machine may offer the CPU wheel to pip; uv knows where PyTorch publishes it.
    if pip_install(f"torch=={version}+cpu"):
        return True
    print(f"pip finds no torch=={version}+cpu: asking uv", flush=True)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    command = [*uv, "--torch-backend=cpu", f"torch=={version}"]
    if pip_install("uv") and subprocess.run(command, check=False).returncode == 0:
        return True
    print(f"uv finds no CPU build: installing torch=={version} with its CUDA libraries", flush=True)
    return pip_install(f"torch=={version}")


if __name__ == "__main__":
    if not install(*sys.argv[1:] or [VERSION]):
        sys.exit("PyTorch was not installed; SMP_TORCH chooses another pip requirement for it.")
