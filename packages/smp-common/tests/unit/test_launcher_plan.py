"""The command that plans, as far as it needs no framework: scripts that write a profile by hand."""

from __future__ import annotations

import json
import os
import shlex
import xml.etree.ElementTree
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_search import transformer

from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.launcher import cli, measuring, plan
from smdistributed.modelparallel.common.launcher.cli import split_arguments
from smdistributed.modelparallel.common.search.measurement import Calibrations, Measured
from smdistributed.modelparallel.common.search.tables import gib

#: Stands for a script that comes to its first training step.
SCRIPT = """
import os, pathlib, sys
assert sys.argv[1:] == ["--batch", "16"], sys.argv
profile = pathlib.Path(__file__).with_suffix(".json").read_text()
pathlib.Path(os.environ["SMP_PROFILE"]).write_text(profile)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text(transformer(4, batch=16).to_json())
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def test_a_plan_is_a_table_of_commands(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [script, "--hosts", "a:4,b:4", "--lines", "3", "--json", "plan.json", "--explain", "2"]
    assert plan.main([*words, "--html", "plan.html", "--", "--batch", "16"], prog="plan") == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line[3:] for line in lines if line[1:3] == ": "]
    document = json.loads(Path("plan.json").read_text())
    assert commands == [each["command"] for each in document["best"]]
    assert len(commands) == 3
    for command in commands:
        own, program = split_arguments(shlex.split(command)[1:])
        assert own[:2] == ["-n8", "--hosts=a:4,b:4"]
        assert any(word.startswith("--set=microbatches=") for word in own)
        assert program == ("train.py", "--batch", "16")
    rates = [each["examples_per_second"] for each in document["best"]]
    assert min(rates) > max(rates) / 2
    assert "2 hosts" in "\n".join(lines)
    assert Path("plan-2.svg").read_text().startswith("<svg")
    page = Path("plan.html").read_text()
    first = document["best"][0]
    for kind, num_bytes in first["memory_bytes"][0].items():
        assert f"<title>{gib(num_bytes)} GiB {kind}</title>" in page
    for place, line in enumerate(document["best"], 1):
        assert f"<title>line {place}: {1e3 * line['step_seconds']:.1f} ms" in page
    num_ranks = first["parameters"]["pipeline_parallel_degree"]
    assert ("as simulated" in page) == (num_ranks > 1)
    xml.etree.ElementTree.fromstring(
        page.split("<body>")[1].split("</pre>")[1].split("</h2>")[1].split("<h2>")[0]
    )


def test_smprun_plans_with_what_it_is_told(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-n", "2", "--set", "partitions=2", "--set", "bf16=true", "--set", "ddp=true"]
    program = [script, "--batch", "16"]
    assert cli.main([*words, "--plan", "h100", "--memory", "40GB", *program]) == 0
    out = capsys.readouterr().out
    assert "2 x h100, 37.3 GiB each" in out
    commands = [line[3:] for line in out.splitlines() if line[1:3] == ": "]
    assert commands
    for command in commands:
        _, *rest = shlex.split(command)
        assert cli.main(["--dry-run", *rest]) == 0
        assert "--set bf16=true" in command
        assert "--set partitions" not in command


def test_what_fits_nowhere_says_why(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [script, "--devices", "2", "--memory", "1GiB", "--", "--batch", "16"]
    assert plan.main(words, prog="plan") == 1
    out = capsys.readouterr().out
    assert "does not fit: " in out
    assert " GiB = " in out
    assert "smprun" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py", "--devices", "2"], "there is no file none.py"),
        (["train.py", "--devices", "2", "--memory", "80 parsecs"], "write 80GiB or 80GB"),
        (["train.py", "--devices", "2", "--memory", "80"], "a number above 0 and a unit"),
        (["train.py", "--devices", "2", "--lines", "0"], "at least 1; received 0"),
        (["train.py", "--devices", "2", "--device", "tpu"], "received 'tpu'"),
        (["train.py", "--devices", "2", "--device", "cpu"], "such as 4GiB"),
        (["train.py", "--hosts", "a:4,b:2"], "equally many devices; received a:4,b:2"),
        (["train.py"], "give --devices"),
    ],
)
def test_what_cannot_be_planned_is_refused(script: str, words: list[str], message: str) -> None:
    with pytest.raises(SMPError, match=message):
        plan.main(words, prog="plan")


def test_a_line_that_is_not_there_is_refused(script: str) -> None:
    words = [script, "--devices", "2", "--lines", "2", "--explain", "3", "--", "--batch", "16"]
    with pytest.raises(ConfigError, match="a line of the table, 1 to 2; received 3"):
        plan.main(words, prog="plan")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(3)", "ended before with exit code 3"),
        ("pass", "ended without one: call a function under @smp.step"),
    ],
)
def test_a_script_without_a_training_step_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(SMPError, match=message):
        plan.recorded([str(tmp_path / "train.py")], os.environ)


def test_measured_lines_stand_beside_what_was_planned(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    taken = iter([0.5, 0.25, 1.0])
    seen = []

    def measured(command: list[str], step: str, environ: Mapping[str, str]) -> Measured:
        seen.append((command, step))
        return Measured("NVIDIA H100 80GB HBM3", next(taken), 10)

    monkeypatch.setattr(plan, "measured", measured)
    words = [script, "--devices", "2", "--json", "plan.json"]
    assert plan.main([*words, "--measure", "2", "--", "--batch", "16"], prog="plan") == 0
    lines = json.loads(Path("plan.json").read_text())["best"]
    assert [shlex.join(command) for command, _ in seen] == [each["command"] for each in lines[:2]]
    assert {step for _, step in seen} == {"train_step"}
    out = capsys.readouterr().out
    assert f"   2  {1e3 * lines[1]['step_seconds']:12.1f}        250.0" in out
    seconds = [each["step_seconds"] for each in lines]
    factor = (0.5 / seconds[0] + 0.25 / seconds[1]) / 2
    assert plan.main([*words, "--", "--batch", "16"], prog="plan") == 0
    assert f"times {factor:.3g} as steps of this model were measured" in capsys.readouterr().out
    later = json.loads(Path("plan.json").read_text())
    assert later["best"][0]["step_seconds"] == pytest.approx(factor * seconds[0])
    monkeypatch.setattr(plan, "measured", lambda *_: Measured("cpu", 1.0, 10))
    with pytest.raises(ConfigError, match="planned for, h100; this job ran on cpu"):
        plan.main([*words, "--measure", "1", "--", "--batch", "16"], prog="plan")


def test_a_job_that_makes_too_few_steps_is_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("print('few steps')")
    with pytest.raises(SMPError, match=r"measured by 16 calls of step; .* ended before(?s:.*)few"):
        measuring.measured(["smprun", "-n", "1", str(file)], "step", os.environ)


def test_what_was_measured_is_read(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    file.write_text("cpu\n" + "".join(f"{second}\n" for second in (0, 9, 9, 9, 9, 10, 12, 14, 99)))
    assert Measured.read(file) == Measured("cpu", 2.0, 3)
    file.write_text("cpu\n0\n1\n")
    assert Measured.read(file) is None
    kept = Calibrations(tmp_path / "cut-off.json")
    kept.file.write_text('{"cpu')
    assert kept.factor(transformer(1), "cpu") is None
