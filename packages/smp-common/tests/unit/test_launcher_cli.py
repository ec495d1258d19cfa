from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.launcher.cli import main, split_arguments

VARIABLE = "SM_HP_MP_PARAMETERS"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "train.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return str(path)


@pytest.mark.parametrize(
    ("line", "own", "program"),
    [
        ("-n 4 t.py -n 5 --set a=b", ["-n4"], ("t.py", "-n", "5", "--set", "a=b")),
        ("-n4 --dry-run t.py", ["-n4", "--dry-run"], ("t.py",)),
        ("--mpi-args -v -m mod --x -- y", ["--mpi-args=-v"], ("-m", "mod", "--x", "--", "y")),
        ("--set=a=1 --set b=2 t.py", ["--set=a=1", "--set=b=2"], ("t.py",)),
        ("-n 2", ["-n2"], ()),
    ],
)
def test_what_follows_the_program_is_its_own(
    line: str, own: list[str], program: tuple[str, ...]
) -> None:
    assert split_arguments(line.split()) == (own, program)


def test_dry_run(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = "-n 4 --hosts a:2,b:2 --set partitions=2 --set ddp=True --dry-run"
    assert main([*line.split(), script, "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in shown.splitlines()]
    assert ["b", "2", "2-3"] in rows
    assert ["3", "b", "1", "1", "0", "1", "1", "1"] in rows
    assert ["PP_GROUP", "(0 1)  (2 3)"] in rows
    assert ["pipeline_parallel_degree", "2", "--set"] in rows
    assert ["microbatches", "1", "default"] in rows
    assert f"{shlex.quote(script)} --lr 1" in shown.splitlines()[-1]
    assert "--host a:2,b:2" in shown.splitlines()[-1]
    assert not Path(script).with_name("ran").exists()


def test_dry_run_with_an_incomplete_configuration(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-n2", "--set", "microbatches=2", "--dry-run", script]) == 0
    captured = capsys.readouterr()
    assert "script (assumed)" in captured.out
    assert "smprun: warning: unless smp.init in the script adds" in captured.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 3 --set pipeline_parallel_degree=2", "must be a multiple of"),
        ("-n 2 --set microbatchs=2", "microbatches"),
        ("-n 2 --mpi-args='", "close the quote"),
        ("-n 2 --mpi-args=4", "belongs to no option"),
        ("-n 2 --hostfile /none", "/none"),
        ("--hosts a,b", "give -n"),
    ],
)
def test_errors_name_the_rule_and_start_nothing(
    script: str, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), script]) == 2
    error = capsys.readouterr().err
    assert error.startswith("smprun: ")
    assert message in error
    assert "Traceback" not in error
    assert not Path(script).with_name("ran").exists()


def test_a_missing_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "2", "none.py"]) == 2
    assert "there is no file none.py" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["-n", "2"], ["-n", "2", "-m"], ["--what", "1", "x.py"]])
def test_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


def test_the_number_of_processes_comes_from_the_mpi_options(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--mpi-args", "-np 2 --host a:1,b:1", "--dry-run", script]) == 0
    assert "-n 2 --host a:1,b:1" in capsys.readouterr().out
    assert main(["-n", "3", "--mpi-args", "-np 2", "--dry-run", script]) == 2
    assert "received 3 and 2" in capsys.readouterr().err


def test_the_number_of_processes_comes_from_the_envelope(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "smdistributed: {modelparallel: {enabled: true, parameters: {ddp: true}}}\n"
        "mpi: {enabled: true, processes_per_host: 2, custom_mpi_options: '-x A=1'}\n"
    )
    assert main(["--config", str(config), "--hosts", "a,b", "--dry-run", script]) == 0
    shown = capsys.readouterr().out
    assert "-n 4 --host a:2,b:2" in shown
    assert "-x A=1" in shown


def test_run_as_a_module() -> None:
    line = [sys.executable, "-m", "smdistributed.modelparallel.common.launcher", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "--dry-run" in done.stdout
