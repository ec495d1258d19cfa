"""Where PyTorch comes from, by what a machine offers."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import install_torch
import pytest


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes what was asked for; nothing can be had."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(" ".join(command[2:]))
        return SimpleNamespace(returncode=0 if command[-1] == "uv" else 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("SMP_TORCH", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    return asked


def test_without_a_gpu_the_cpu_build_is_looked_for_first(tried: list[str]) -> None:
    assert not install_torch.install("2.15.0")
    cpu, uv, through_uv, plain = tried
    assert cpu == "pip install --quiet --no-compile torch==2.15.0+cpu"
    assert uv == "pip install --quiet --no-compile uv"
    assert through_uv.endswith("--torch-backend=cpu torch==2.15.0")
    assert plain == "pip install --quiet --no-compile torch==2.15.0"


def test_a_gpu_takes_the_plain_build(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    install_torch.install("2.15.0")
    assert tried == ["pip install --quiet --no-compile torch==2.15.0"]


def test_a_chosen_requirement_is_all_that_is_tried(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_TORCH", "torch==2.12.*")
    install_torch.install("2.15.0")
    assert tried == ["pip install --quiet --no-compile torch==2.12.*"]
