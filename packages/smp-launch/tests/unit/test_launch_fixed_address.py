"""The address that the service's SDK asks past every setting leads to the loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smdistributed.modelparallel.launch import api

STARTERS = Path(api.__file__).parent / "import_path"
#: As the SDK has it, beside a function that stays.
UTILS = """
def sts_regional_endpoint(region):
    return f"https://sts.{region}.example"
def other(region):
    return region
"""
ASKS = """
from sagemaker.utils import other, sts_regional_endpoint
print(sts_regional_endpoint("r"), other("o"))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "sagemaker").mkdir()
    (tmp_path / "sagemaker/__init__.py").touch()
    (tmp_path / "sagemaker/utils.py").write_text(UTILS)
    (tmp_path / "sitecustomize.py").write_text("print('own')")
    return tmp_path


def run(place: Path, program: str, **variables: str) -> list[str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    path = os.pathsep.join(map(str, (STARTERS, place)))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "https://sts.r.example"),
        ({"AWS_ENDPOINT_URL": "http://here"}, "http://here"),
        ({"AWS_ENDPOINT_URL": "http://here", "AWS_ENDPOINT_URL_STS": "http://sts"}, "http://sts"),
    ],
)
def test_the_address_is_that_of_the_settings(
    place: Path, variables: dict[str, str], found: str
) -> None:
    assert run(place, ASKS, **variables) == ["own", f"{found} o"]


def test_programs_without_the_sdk_start_as_ever(place: Path) -> None:
    (place / "sagemaker/utils.py").unlink()
    program = "import importlib.util as u; print(u.find_spec('sagemaker.utils'))"
    assert run(place, program, AWS_ENDPOINT_URL="http://here") == ["own", "None"]
    (place / "sagemaker/utils.py").write_text("word = 1")
    program = "import sagemaker.utils as u; print(u.word, hasattr(u, 'sts_regional_endpoint'))"
    assert run(place, program, AWS_ENDPOINT_URL="http://here") == ["own", "1 False"]
