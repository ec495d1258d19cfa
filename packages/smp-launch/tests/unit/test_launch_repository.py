"""Scripts in a repository: by a folder, as by an address."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.job import repository
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import Session

NOBODY = ("-c", "user.name=a", "-c", "user.email=a@example.com")


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *NOBODY, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "src").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    for number in ("one", "two"):
        (folder / "src/train.py").write_text(f"# {number}")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", number)
    git(folder, "branch", "other", "main~1")
    return folder


def shipped(root: Path, config: dict[str, Any], **given: Any) -> str:
    base = {"entry_point": "train.py", "source_dir": "src"}
    session = Session(root=root / "jobs")
    estimator = PyTorch(git_config=config, sagemaker_session=session, **{**base, **given})
    with estimator._code() as code:
        assert code is not None
        return code.files[code.program].read_text()


def test_a_script_comes_from_its_branch_or_commit(tmp_path: Path, repo: Path) -> None:
    first = git(repo, "rev-parse", "main~1")
    assert shipped(tmp_path, {"repo": str(repo)}) == "# two"
    assert shipped(tmp_path, {"repo": repo.as_uri(), "branch": "other"}) == "# one"
    assert shipped(tmp_path, {"repo": str(repo), "branch": "main", "commit": first}) == "# one"
    alone = {"entry_point": "src/train.py", "source_dir": None}
    assert shipped(tmp_path, {"repo": str(repo)}, **alone) == "# two"
    with pytest.raises(ConfigError, match=r"inside the repository; got '\.\./jobs'"):
        shipped(tmp_path, {"repo": str(repo)}, source_dir="../jobs")


def test_what_cannot_be_cloned_is_an_error_without_secrets(tmp_path: Path, repo: Path) -> None:
    with pytest.raises(StorageError, match="Remote branch none not found"):
        shipped(tmp_path, {"repo": str(repo), "branch": "none"})
    secret = {"repo": "http://127.0.0.1:9/x.git", "username": "me", "password": "se/cret"}
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:9/x\.git: .*") as error:
        shipped(tmp_path, secret)
    assert "cret" not in str(error.value)
    assert repository._address(secret) == "http://me:se%2Fcret@127.0.0.1:9/x.git"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("x", "must be a dictionary; got 'x'"),
        ({}, "needs repo"),
        ({"repo": "--upload-pack=x"}, "repo must be a text"),
        ({"repo": "x", "branch": 1}, "branch must be a text that says it; got 1"),
        ({"repo": "x", "brnch": "y"}, "did you mean"),
        ({"repo": "x", "username": "y"}, "username and password together"),
    ],
)
def test_what_breaks_a_rule_is_an_error(tmp_path: Path, config: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        shipped(tmp_path, config)
