"""When ranks are copies of one process, and what if that cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.launcher import copies
from smdistributed.modelparallel.common.launcher.cli import main
from smdistributed.modelparallel.common.launcher.command import Job
from smdistributed.modelparallel.common.launcher.hosts import Host
from smdistributed.modelparallel.common.launcher.mpi_options import MpiOptions

OWN = "import smdistributed.modelparallel.torch as smp\n"
MANY = "-n3 --hosts=localhost:3"


@pytest.mark.parametrize(
    ("text", "line", "variables", "wanted"),
    [
        (OWN, MANY, {}, True),
        (OWN, f"{MANY} --no-fork", {}, False),
        (OWN, "-n2", {}, False),
        (OWN, "-n2 --fork", {}, True),
        (OWN, "--hosts=elsewhere:3", {}, False),
        (OWN, "--hosts=localhost:3,elsewhere:3", {}, False),
        (OWN, MANY, {"CUDA_VISIBLE_DEVICES": "0"}, False),
        (OWN, MANY, {"PYTHONHASHSEED": "random"}, False),
        ("import torch\n", MANY, {}, False),
    ],
)
def test_ranks_are_copies_where_they_outnumber_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    line: str,
    variables: dict[str, str],
    wanted: bool,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name in ("PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*line.split(), "--set=pipeline_parallel_degree=1", "--dry-run", str(script)]) == 0
    shown = capsys.readouterr()
    assert ("stand_in.py" in shown.out) == wanted
    assert ("copies of one" in shown.err) == (wanted and "--fork" not in line)


def test_a_job_starts_as_it_is_where_no_copies_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copies._IMPORTED, "pytorch", ("no_such_module",))
    job = Job((Host("localhost", 3),), MpiOptions(), ("train.py",), dict(os.environ))
    said: list[str] = []
    with copies.of_one_process(job, "pytorch", is_asked=False, say=said.append) as started:
        assert started is job
    (text,) = said
    assert text.startswith("no copies: each process imports the framework itself"), text
    assert "No module named 'no_such_module'" in text
    with (
        pytest.raises(SMPError, match="no_such_module must be importable in a process"),
        copies.of_one_process(job, "pytorch", is_asked=True, say=said.append),
    ):
        pass
