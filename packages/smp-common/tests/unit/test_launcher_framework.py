"""Which framework a program is taken to be for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.launcher import framework
from smdistributed.modelparallel.common.launcher.cli import main

SMP = "smdistributed.modelparallel"


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return (name in packages or None) if name.startswith(SMP) else find(name)

    monkeypatch.setattr(framework.importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"import {SMP}.tensorflow as smp\nimport torch", "tensorflow"),
        (f"from {SMP} import tensorflow as smp", "tensorflow"),
        (f"def main():\n    from {SMP}.torch import init", "pytorch"),
        ("import tensorflow.keras", "tensorflow"),
        ("import torch, tensorflow", "pytorch"),
        ("import tensorflow_datasets", "pytorch"),
        ("import of the script", "pytorch"),
        ("\0", "pytorch"),
    ],
)
def test_the_imports_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    installed(monkeypatch, f"{SMP}.torch", f"{SMP}.tensorflow")
    path = tmp_path / "train.py"
    path.write_text(text)
    assert framework.guess([str(path), "--lr", "1"]) == expected


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    (tmp_path / "train_keras.py").write_text("import tensorflow")
    monkeypatch.syspath_prepend(tmp_path)
    assert framework.guess(["-m", "train_keras"]) == "tensorflow"
    assert framework.guess(["-m", "no.such.module"]) == "pytorch"


@pytest.mark.parametrize(
    ("packages", "expected"), [(("torch",), "pytorch"), (("tensorflow",), "tensorflow")]
)
def test_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], expected: str
) -> None:
    installed(monkeypatch, *(f"{SMP}.{each}" for each in packages))
    path = tmp_path / "train.py"
    path.write_text("import my_project")
    assert framework.guess([str(path)]) == expected


def test_a_configuration_of_tensorflow_needs_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    path = tmp_path / "train.py"
    words = ["-n2", "--set", "partitions=2", "--set", "contiguous=true", "--dry-run", str(path)]
    path.write_text(f"import {SMP}.tensorflow as smp")
    assert main(words) == 0
    path.write_text(f"import {SMP}.torch as smp")
    assert main(words) == 2
    assert "contiguous is a parameter of TensorFlow only" in capsys.readouterr().err
