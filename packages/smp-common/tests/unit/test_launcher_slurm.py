from __future__ import annotations

from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.hosts import Host
from smdistributed.modelparallel.common.launcher.slurm import allocated_hosts, tasks_per_host

INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for Slurm's, which expands names of hosts."""
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\n[ \"$3\" = 'n[1-2]' ] && printf 'n1\\nn2\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("2", (2,)), ("2(x3),1", (2, 2, 2, 1)), ("1,4(x1)", (1, 4)), ("", ()), ("2x", ())],
)
def test_tasks_per_host(text: str, tasks: tuple[int, ...]) -> None:
    assert tasks_per_host(text) == tasks


@pytest.mark.parametrize(
    ("tasks", "num_ranks", "hosts"),
    [
        ("2(x2)", None, (Host("n1", 2), Host("n2", 2))),
        ("3,1", 4, (Host("n1", 3), Host("n2", 1))),
        ("3,1", 2, (Host("n1", 3), Host("n2", 1))),
        ("1(x2)", 4, (Host("n1"), Host("n2"))),
        ("", 4, (Host("n1"), Host("n2"))),
    ],
)
def test_hosts(scontrol: Path, tasks: str, num_ranks: int | None, hosts: tuple[Host, ...]) -> None:
    environ = {**INSIDE, "SLURM_TASKS_PER_NODE": tasks}
    assert allocated_hosts(environ, num_ranks) == hosts


def test_outside_of_an_allocation_nobody_is_asked() -> None:
    assert allocated_hosts({"SLURM_JOB_NODELIST": "n1"}, 4) == ()


def test_slurm_without_an_answer(scontrol: Path) -> None:
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"SLURM_JOB_NODELIST='n\[1-2\]': name the hosts"):
            allocated_hosts(INSIDE, 4)
        scontrol.unlink(missing_ok=True)
