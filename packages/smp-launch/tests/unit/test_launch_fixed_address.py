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


LOCAL = """
class Session:
    def __init__(self, boto_session=None, default_bucket=None):
        self.local_mode, self.bucket = False, default_bucket
    def _intercept_create_request(self, request, create):
        return request
class LocalSession(Session):
    def __init__(self):
        raise RuntimeError("needs an engine of containers")
"""
USES_LOCAL = """
from sagemaker.local.local_session import LocalSession, Session
session = LocalSession(default_bucket="b", disable_local_code=True)
assert isinstance(Session(), LocalSession) and not isinstance(1, LocalSession)
source = {"FileUri": "file:///d", "FileDataDistributionType": "FullyReplicated"}
request = {
    "InputDataConfig": [{"DataSource": {"FileDataSource": source}}],
    "HyperParameters": {"sagemaker_submit_directory": '"file://code"'},
}
request = session._intercept_create_request(request, None)
print(session.local_mode, session.bucket, request["HyperParameters"]["sagemaker_submit_directory"])
print(request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"])
"""


def test_local_sessions_are_the_interfaces(place: Path) -> None:
    (place / "sagemaker/local").mkdir()
    (place / "sagemaker/local/__init__.py").touch()
    (place / "sagemaker/local/local_session.py").write_text(LOCAL)
    found = run(place, USES_LOCAL, AWS_ENDPOINT_URL="http://here")
    assert found == ["own", f'True b "file://{os.getcwd()}/code"', "file:///d"]
    with pytest.raises(subprocess.CalledProcessError):
        run(place, USES_LOCAL)


def test_the_address_is_changed_wherever_the_sdk_has_it(place: Path) -> None:
    (place / "sagemaker_core").mkdir()
    (place / "sagemaker_core/__init__.py").touch()
    (place / "sagemaker_core/helper.py").write_text(UTILS)
    asks = ASKS.replace("sagemaker.utils", "sagemaker_core.helper")
    assert run(place, asks, AWS_ENDPOINT_URL="http://here") == ["own", "http://here o"]


def test_programs_without_the_sdk_start_as_ever(place: Path) -> None:
    (place / "sagemaker/utils.py").unlink()
    program = "import importlib.util as u; print(u.find_spec('sagemaker.utils'))"
    assert run(place, program, AWS_ENDPOINT_URL="http://here") == ["own", "None"]
    (place / "sagemaker/utils.py").write_text("word = 1")
    program = "import sagemaker.utils as u; print(u.word, hasattr(u, 'sts_regional_endpoint'))"
    assert run(place, program, AWS_ENDPOINT_URL="http://here") == ["own", "1 False"]
