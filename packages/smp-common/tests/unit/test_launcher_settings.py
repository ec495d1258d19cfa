from __future__ import annotations

import json
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.settings import (
    check,
    launch_environment,
    merge,
    parse_setting,
    read_config_file,
)

VARIABLE = "SM_HP_MP_PARAMETERS"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("microbatches=4", ("microbatches", 4)),
        ("ddp=True", ("ddp", True)),
        ("ddp=false", ("ddp", False)),
        ("memory_weight=0.5", ("memory_weight", 0.5)),
        ("sdp_reduce_bucket_size=5e8", ("sdp_reduce_bucket_size", 5e8)),
        ("optimize=speed", ("optimize", "speed")),
        ("a=b=c", ("a", "b=c")),
        ("a=[", ("a", "[")),
    ],
)
def test_settings_are_typed(text: str, setting: tuple[str, object]) -> None:
    assert parse_setting(text) == setting


@pytest.mark.parametrize("text", ["microbatches", "=4"])
def test_a_setting_needs_key_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--set takes key=value"):
        parse_setting(text)


def test_a_later_source_wins_key_by_key() -> None:
    inherited = {VARIABLE: '{"microbatches": 1, "ddp": true, "optimize": "speed"}'}
    merged = merge(inherited, {"microbatches": 2, "optimize": "memory"}, [("microbatches", 3)])
    assert merged.parameters == {"ddp": True, "optimize": "memory", "microbatches": 3}
    assert merged.sources == {
        "ddp": VARIABLE,
        "optimize": "--config",
        "microbatches": "--set",
    }


def test_another_spelling_is_replaced_too() -> None:
    merged = merge({VARIABLE: '{"partitions": 4}'}, {}, [("pipeline_parallel_degree", 2)])
    assert merged.parameters == {"pipeline_parallel_degree": 2}
    assert merged.sources == {"pipeline_parallel_degree": "--set"}


def test_the_comma_form_is_inherited_with_types() -> None:
    merged = merge({VARIABLE: "ddp=True,microbatches=4"}, {}, [])
    assert merged.parameters == {"ddp": True, "microbatches": 4}


def test_an_inherited_value_must_be_readable() -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        merge({VARIABLE: "{"}, {}, [])


def test_the_job_gets_json() -> None:
    environ = launch_environment({"A": "1"}, merge({}, {"ddp": True}, []))
    assert json.loads(environ[VARIABLE]) == {"ddp": True}
    assert environ["A"] == "1"
    assert VARIABLE not in launch_environment({}, merge({}, {}, []))


def test_config_file_with_envelope(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    mpi = {"enabled": True, "processes_per_host": 4, "custom_mpi_options": "-x A=1"}
    model = {"enabled": True, "parameters": {"ddp": True}}
    path.write_text(json.dumps({"smdistributed": {"modelparallel": model}, "mpi": mpi}))
    file = read_config_file(str(path))
    assert file.parameters == {"ddp": True}
    assert (file.processes_per_host, file.custom_mpi_options) == (4, "-x A=1")


def test_model_parallelism_needs_mpi(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    model = {"enabled": True, "parameters": {"ddp": True}}
    path.write_text(json.dumps({"smdistributed": {"modelparallel": model}, "mpi": {}}))
    with pytest.raises(ConfigError, match=r"needs mpi\.enabled true and mpi\.processes_per_host"):
        read_config_file(str(path))


def test_plain_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("pipeline_parallel_degree: 2\n")
    file = read_config_file(str(path))
    assert file.parameters == {"pipeline_parallel_degree": 2}
    assert file.processes_per_host is None


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_config_file(str(tmp_path / "none.yaml"))


def test_a_certain_mistake_is_an_error() -> None:
    with pytest.raises(ConfigError, match="microbatchs"):
        check("pytorch", {VARIABLE: '{"microbatchs": 2, "ddp": true}'}, 2, 2)
    with pytest.raises(ConfigError, match="must be a multiple of"):
        check("pytorch", {VARIABLE: '{"pipeline_parallel_degree": 4}'}, 2, 2)


def test_what_the_script_may_put_right_is_a_remark() -> None:
    config, remark = check("pytorch", {VARIABLE: '{"microbatches": 2}'}, 2, 2)
    assert config.microbatches == 2
    assert remark is not None
    assert "no parallelism" in remark


def test_without_a_configuration_the_script_decides() -> None:
    _, remark = check("pytorch", {}, 4, 4)
    assert remark is None
