"""A population of bad input to the configuration, the environment and the command line.

Each is an error of the house form, which names what it is about and what was received, or is
accepted for a reason that stands beside it. Nothing crashes, hangs or is taken for something else.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.comm.transport import started_by_torchrun
from smdistributed.modelparallel.common.config import ConfigWarning, load
from smdistributed.modelparallel.common.config.parameters import Parameters
from smdistributed.modelparallel.common.config.schema import parameter
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.cli import main

VARIABLE = "SM_HP_MP_PARAMETERS"

# ---------------------------------------------------------------- values of parameters


class Odd:
    """What nobody would pass."""

    def __repr__(self) -> str:
        return "Odd()"


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: dict[str, Any] = {
    "None": None,
    "text": "many",
    "empty text": "",
    "negative": -3,
    "half": 0.5,
    "infinite": float("inf"),
    "not a number": float("nan"),
    "list": [1, 2],
    "dict": {"a": 1},
    "object": Odd(),
    "nested": _nested(5000),
}
#: Kinds of values that are as good as none: the parameter keeps its default.
NONE = ("None",)
_BASE: dict[str, dict[str, Any]] = {
    "pytorch": {"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True},
    "tensorflow": {"pipeline_parallel_degree": 2, "microbatches": 4},
}


def wrong_values() -> list[Any]:
    return [
        pytest.param(name, kind, id=f"{name}={kind}")
        for name, kind in itertools.product(Parameters.model_fields, VALUES)
    ]


@pytest.mark.parametrize(("name", "kind"), wrong_values())
def test_wrong_values_are_named(name: str, kind: str) -> None:
    framework = parameter(Parameters.model_fields[name]).frameworks[0]
    given = {**_BASE[framework], name: VALUES[kind]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            config = load(framework, given, environ={})
        except ConfigError as error:
            text = str(error)
            assert re.search(rf"\b{name}\b.*\b(must|needs|exclude|takes)\b", text), text
            assert re.search(r"\b[Gg]ot\b", text), text
            assert len(text) < 3000
        else:
            # What was given is what counts: nothing is repaired.
            assert kind in NONE or getattr(config, name) == VALUES[kind]


# ---------------------------------------------------------------- documents


def _deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


#: Text of the launcher's variable -> what the error says.
LAUNCHED = {
    "[]": "JSON object|dictionary",
    "5": "JSON object|dictionary",
    "null": "JSON object|dictionary",
    '"partitions"': "JSON object|dictionary",
    "{": "JSON object",
    "{partitions: 2}": "JSON object",
    '{"partitions": 2,}': "JSON object",
    '{"partitions": 2} trailing': "JSON object",
    "partitions": "JSON object",
    "partitions=2,microbatches": "JSON object",
    "partitions==2": "partitions",
    "=2": "'' is not a known parameter",
    "partitions=two": "partitions",
    "partitions=0": "partitions",
    "ddp=maybe": "ddp",
    "microbatches=1e400": "microbatches",
    '{"partitions": Infinity}': "partitions",
    '{"partitions": NaN}': "partitions",
    '{"partitions": 1e999}': "partitions",
    '{"partitions": "2"}': "partitions",
    '{"partitions": true}': "partitions",
    '{"partitions": 2, "pipeline_parallel_degree": 4}': "partitions",
    '{"partition": 2}': "partition",
    '{"": 2}': "not a known parameter",
    '{"microbatches": 4}': "asks for no parallelism",
    _deep(100_000): "JSON object",
    "[" * 100_000: "JSON object",
    '{"\\ud800": 2}': "not a known parameter",
    "\x00": "JSON object",
}


@pytest.mark.parametrize("text", LAUNCHED, ids=lambda text: repr(text[:40]))
def test_what_the_launcher_says(text: str) -> None:
    with pytest.raises(ConfigError, match=LAUNCHED[text]) as raised:
        load("pytorch", environ={VARIABLE: text})
    assert len(str(raised.value)) < 3000


#: Content of a configuration file -> what the error says; by its suffix.
FILES = {
    ("yaml", "["): "cannot be read",
    ("yaml", "a: b: c"): "cannot be read",
    ("yaml", "\t- x"): "cannot be read",
    ("yaml", "- partitions"): "dictionary",
    ("yaml", "5"): "dictionary",
    ("yaml", "!!python/object/apply:os.system ['true']"): "cannot be read",
    ("yaml", "partitions: !!python/name:os.system"): "cannot be read",
    ("yaml", "&a [*a]"): "dictionary",
    ("yaml", "partitions: 2\npartitions: two"): "partitions",
    ("yaml", "partitions: 2020-01-01"): "partitions",
    ("yaml", "partitions: 2,5"): "partitions",
    ("yaml", "? [1, 2]\n: 3\npartitions: 2"): "not a known parameter|cannot be read",
    ("yaml", "1: 2\npartitions: 2"): "not a known parameter",
    ("json", ""): "cannot be read",
    ("json", "{'partitions': 2}"): "cannot be read",
    ("json", "[]"): "dictionary",
    ("json", _deep(100_000)): "cannot be read",
    ("json", '{"smdistributed": 5}'): "smdistributed",
    ("json", '{"smdistributed": {"modelparallel": []}}'): "modelparallel",
    ("json", '{"smdistributed": {"modelparallel": {"enabled": 1}}}'): "enabled",
    ("json", '{"smdistributed": {"modelparallel": {"enabled": true}}}'): "parameters",
    ("json", '{"smdistributed": {"modelparalel": {}}}'): "modelparalel",
    (
        "json",
        '{"smdistributed": {"modelparallel": {"enabled": true, "parameters": 5}}}',
    ): "parameters",
    (
        "json",
        '{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {"partitions": 2}}}, '
        '"mpi": {"enabled": true, "processes_per_host": "x"}}',
    ): "processes_per_host",
    (
        "json",
        '{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {"partitions": 2}}}, '
        '"mpi": {"enabled": true, "processes_per_host": 2, "custom_mpi_options": "-x \'"}}',
    ): "custom_mpi_options",
}


@pytest.mark.parametrize(
    ("suffix", "content"), FILES, ids=lambda text: repr(text[:40]) if len(text) > 4 else text
)
def test_files(tmp_path: Path, suffix: str, content: str) -> None:
    path = tmp_path / f"config.{suffix}"
    path.write_text(content)
    with pytest.raises(ConfigError, match=FILES[suffix, content]) as raised:
        load("pytorch", str(path), environ={})
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize("given", [5, [], [("partitions", 2)], {1, 2}, b"partitions", Odd(), True])
def test_what_smp_init_is_given(given: Any) -> None:
    with pytest.raises(ConfigError, match="must be a dictionary of parameters; got"):
        load("pytorch", given, environ={})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "binary.yaml", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load("pytorch", str(path), environ={})


# ---------------------------------------------------------------- variables of a rank

RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
_LARGE = "10" * 9
WRONG_NUMBERS = ("", "x", "-1", "1.5", "1e1", "0x1", "²", "nan", _LARGE)
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def wrong_numbers() -> list[tuple[str, str]]:
    pairs = itertools.product(RANK_VARIABLES, WRONG_NUMBERS)
    return [pair for pair in pairs if pair != ("WORLD_SIZE", _LARGE)]  # a job may be large


@pytest.mark.parametrize(("name", "text"), wrong_numbers())
def test_variables_of_a_rank(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be an integer.*received '{text}'"):
        started_by_torchrun({**RANK, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", name: text})


# ---------------------------------------------------------------- the command line

#: Words of a command line -> what the error says. ``SCRIPT`` is a script, ``EMPTY`` an empty file;
#: ~ stands for a space inside a word.
LINES = {
    "": "no program given",
    "-n 2": "no program given",
    "-n 2 none.py": "there is no file none.py",
    "-n 2 .": "Python file",
    "-n SCRIPT": "invalid int value|no program",
    "-n 0 SCRIPT": "at least 1|process",
    "-n -1 SCRIPT": "at least 1|process",
    "-n 1.5 SCRIPT": "invalid int value",
    "-n x SCRIPT": "invalid int value",
    "-n 99999999999999999999 SCRIPT": "process|at most",
    "-m": "needs the name of a module",
    "--nothing SCRIPT": "unrecognized|no program",
    "--nothing=1 SCRIPT": "unrecognized",
    "-q SCRIPT": "unrecognized|no program",
    "--framework jax SCRIPT": "invalid choice",
    "--framework= SCRIPT": "invalid choice",
    "--timeout 0 SCRIPT": "above 0",
    "--timeout -1 SCRIPT": "above 0",
    "--timeout inf SCRIPT": "above 0",
    "--timeout nan SCRIPT": "above 0",
    "--timeout soon SCRIPT": "invalid|above 0",
    "--grace -1 SCRIPT": "above 0",
    "--grace nan SCRIPT": "above 0",
    "--grace x SCRIPT": "invalid|above 0",
    "--set SCRIPT": "key=value|no program",
    "-n 2 --set microbatches SCRIPT": "key=value",
    "-n 2 --set =4 SCRIPT": "key=value",
    "-n 2 --set microbatches=x SCRIPT": "microbatches",
    "-n 2 --set microbatches=0 SCRIPT": "microbatches",
    "-n 2 --set microbatches=[ SCRIPT": "microbatches",
    "-n 2 --set nothing=4 SCRIPT": "nothing",
    "-n 2 --set partitions=2 --set pipeline_parallel_degree=4 SCRIPT": "pipeline_parallel_degree",
    "-n 3 --set partitions=2 SCRIPT": "divide|multiple|3 processes",
    "--config none.yaml SCRIPT": "none.yaml",
    "--config . SCRIPT": "cannot be read",
    "--config SCRIPT SCRIPT": "cannot be read|dictionary",
    "--hosts a:x SCRIPT": "a:x|slots|processes",
    "--hosts a:0 SCRIPT": "a:0|at least|processes",
    "--hosts a:-1 SCRIPT": "a:-1|at least|processes",
    "--hosts a:2,a:2 SCRIPT": "a",
    "--hosts , SCRIPT": "host",
    "--hosts= SCRIPT": "host",
    "--hosts -oProxyCommand=x:2 SCRIPT": "host",
    "--hosts $(x):2 SCRIPT": "host",
    "--hosts a;b:2 SCRIPT": "host",
    "--hosts a:1 -n 4 SCRIPT": "4|processes|slots",
    "--hosts a:1 --hostfile EMPTY SCRIPT": "not allowed with",
    "--hostfile none SCRIPT": "none",
    "--hostfile . SCRIPT": "readable",
    "--hostfile EMPTY SCRIPT": "EMPTY|host",
    "--hostfile SCRIPT SCRIPT": "train.py|host|slots",
    "--mpi-args ' SCRIPT": "quot|--mpi-args|MPI",
    "-n 2 --mpi-args=nothing SCRIPT": "belongs to no option",
    "--mpi-args=-n SCRIPT": "-n",
    "--mpi-args=-np~x SCRIPT": "-np|x",
    "-n 2 --mpi-args=-np~4 SCRIPT": "agree|-np",
}


@pytest.mark.parametrize("line", LINES)
def test_command_lines(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (VARIABLE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    script, empty = tmp_path / "train.py", tmp_path / "empty"
    script.write_text("raise SystemExit('it ran')\n")
    empty.write_text("")
    places = {"SCRIPT": str(script), "EMPTY": str(empty)}
    words = [places.get(word, word).replace("~", " ") for word in line.split()]
    # Whatever is accepted starts nothing.
    try:
        code = main(["--dry-run", *words])
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    said = captured.err.replace(str(empty), "EMPTY")
    assert code == 2, captured
    assert "Traceback" not in said
    assert re.search(r"smprun: error: ", said), said
    assert re.search(LINES[line], said), said


def test_the_population_is_large_enough() -> None:
    parts = (wrong_values(), LAUNCHED, FILES, wrong_numbers(), LINES)
    assert sum(map(len, parts)) >= 400


def test_problems_of_all_sources_come_together() -> None:
    given: Mapping[str, Any] = {"microbatches": "x", "nothing": 1}
    with pytest.raises(ConfigError) as raised:
        load("pytorch", given, {VARIABLE: json.dumps({"ddp": 5, "partitions": 0})})
    for name in ("microbatches", "nothing", "ddp", "partitions"):
        assert name in str(raised.value)
