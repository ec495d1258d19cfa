"""The command that plans, as far as it is of this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from smdistributed.modelparallel.launch import cli


def test_a_plan_is_asked_for_by_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert cli.main(["plan", "--devices", "2", str(script), "--", "7"]) == 2
    assert "ended before with exit code 7" in capsys.readouterr().err


def test_a_plan_has_no_folder_of_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--jobs", str(tmp_path), "plan", "train.py", "--devices", "2"]) == 2
    assert "leave it out" in capsys.readouterr().err
