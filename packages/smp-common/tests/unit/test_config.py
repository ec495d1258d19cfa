"""Parameters and where they come from. Long, since it is one list of tests."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from smdistributed.modelparallel.common.config import Config, ConfigWarning, Framework, load
from smdistributed.modelparallel.common.config.schema import names, unknown_key
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.topology import Topology

_DEFAULTS: dict[str, object] = {
    "pipeline_parallel_degree": 1,
    "auto": False,
    "microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "communication_timeout": 1800.0,
    "contiguous": True,
    "horovod": False,
    "memory_weight": 0.8,
    "ddp": False,
    "active_microbatches": 3,
    "deterministic_server": False,
    "checkpointed_blocks": 0,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "tensor_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "context_parallel_degree": 1,
    "fp16": False,
    "fp16_params": False,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "skip_tracing": False,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "bf16": False,
    "ddp_dist_backend": "auto",
    "delayed_parameter_initialization": False,
    "static_mode": False,
    "fast_mode": False,
    "checkpoint_attentions": False,
}
_SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2}


def _load(framework: Framework = "pytorch", given: Any = None, **environ: str) -> Config:
    return load(framework, given, environ)


def _problems(framework: Framework = "pytorch", given: Any = None, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(framework, given, environ)
    return str(caught.value).split("\n- ")[1:]


def _problem(framework: Framework = "pytorch", given: Any = None, **environ: str) -> str:
    problems = _problems(framework, given, **environ)
    assert len(problems) == 1, problems
    return problems[0]


# ---------------------------------------------------------------- defaults and values


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
@pytest.mark.parametrize("given", [None, {}, {"microbatches": None}])
def test_defaults_of_every_parameter(framework: Framework, given: Any) -> None:
    config = _load(framework, given)
    assert config.model_dump() == _DEFAULTS
    assert {type(v) for v in config.model_dump().values()} == {bool, int, float, str}
    assert all(row.source == "default" for row in config.explain())


def test_defaults_that_depend_on_other_parameters() -> None:
    config = _load(given={"partitions": 4, "optimize": "speed"})
    assert config.active_microbatches == 6
    assert config.memory_weight == 0.2
    assert Config(pipeline_parallel_degree=4).active_microbatches == 6
    assert _load(given={"partitions": 4, "active_microbatches": 1}).active_microbatches == 1


def test_ranks_that_spread_experts_are_those_that_split_modules() -> None:
    config = _load(given={"expert_parallel_degree": 2, "ddp": True})
    assert config.tensor_parallel_degree == 2
    assert config.topology(4).tp_size == 2


def test_every_spelling_is_an_attribute() -> None:
    config = _load(given={"partitions": 4})
    for spelling, name in names(Config).items():
        assert getattr(config, spelling) == getattr(config, name)
    assert config.partitions == 4


def test_config_is_frozen_and_survives_pickling() -> None:
    config = _load(given={"partitions": 2})
    with pytest.raises(ValidationError):
        config.microbatches = 2  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.explain() == config.explain()


def test_integral_floats_are_integers_and_integers_are_floats() -> None:
    config = _load(given={**_SHARDED, "sdp_reduce_bucket_size": 5e8, "sdp_gradient_clipping": 2})
    assert config.sdp_reduce_bucket_size == 500_000_000
    assert type(config.sdp_reduce_bucket_size) is int
    assert config.sdp_gradient_clipping == 2.0


def test_infinite_clipping_bound_is_accepted() -> None:
    given = {**_SHARDED, "sdp_gradient_clipping": float("inf")}
    assert _load(given=given).sdp_gradient_clipping == float("inf")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"partitions": 0}, "partitions must be an integer, at least 1; got 0 (int)."),
        ({"partitions": True}, "partitions must be an integer, at least 1; got True (bool)."),
        ({"partitions": "2"}, "partitions must be an integer, at least 1; got '2' (str)."),
        ({"partitions": 2.5}, "partitions must be an integer, at least 1; got 2.5 (float)."),
        ({"ddp": 1}, "ddp must be true or false; got 1 (int)."),
        ({"ddp": "true"}, "ddp must be true or false; got 'true' (str)."),
        (
            {"ddp": True, "pipeline": "Simple"},
            "pipeline must be one of interleaved, simple, zero_bubble, zero_bubble_v, auto; "
            "got 'Simple' (str).",
        ),
        ({"ddp": True, "placement_strategy": "PD"}, "placement_strategy must be one of cluster,"),
        ({"ddp": True, "ddp_dist_backend": "mpi"}, "one of auto, nccl, gloo; got 'mpi' (str)."),
        (
            {"ddp": True, "memory_weight": 1.1},
            "memory_weight must be a number, at least 0.0, at most 1.0; got 1.1 (float).",
        ),
        ({"ddp": True, "memory_weight": True}, "at most 1.0; got True (bool)."),
        ({"ddp": True, "activation_loading_horizon": 0}, "an integer, greater than 0; got 0"),
        ({"ddp": True, "sdp_param_persistence_threshold": -1}, "an integer, at least 0; got -1"),
        ({"ddp": True, "communication_timeout": float("inf")}, "at most 31536000; got inf"),
        ({"ddp": True, "communication_timeout": float("nan")}, "at most 31536000; got nan"),
        (
            {"ddp": True, "communication_timeout": 0},
            "a number, greater than 0, at most 31536000; got 0 (int).",
        ),
        ({"ddp": True, "active_microbatches": 0}, "an integer, at least 1; got 0 (int)."),
    ],
)
def test_wrong_values(given: dict[str, object], text: str) -> None:
    assert text in _problem(given=given)


def test_all_problems_are_listed_in_one_error() -> None:
    problems = _problems(
        given={"partitions": 0, "fp16": True, "bf16": True, "contiguous": True, "micro": 2},
        SMP_NCCL_THROTTLE_LIMIT="0",
    )
    assert {p.split()[0] for p in problems} == {
        "contiguous",
        "micro",
        "partitions",
        "fp16",
        "SMP_NCCL_THROTTLE_LIMIT",
    }


# ---------------------------------------------------------------- names


def test_unknown_name_gets_up_to_three_suggestions() -> None:
    assert _problem(given={"partitions": 2, "microbatch": 4}) == (
        "microbatch is not a known parameter; did you mean microbatches or active_microbatches?"
    )
    assert _problem(given={"partitions": 2, "zzz": 4}) == "zzz is not a known parameter."
    assert "3 is not a known parameter" in _problem(given={"partitions": 2, 3: 4})


def test_no_more_than_three_suggestions() -> None:
    text = unknown_key("abcd", ["abc1", "abc2", "abc3", "abc4"])
    assert text.count("abc") == 4  # the key and three more


def test_suggestions_belong_to_the_framework() -> None:
    assert "contiguous" not in _problem("pytorch", {"partitions": 2, "contiguos": True})
    assert "did you mean contiguous" in _problem("tensorflow", {"partitions": 2, "contiguos": 1})


def test_parameter_of_the_other_framework() -> None:
    assert _problem("pytorch", {"horovod": True}) == (
        "horovod is a parameter of TensorFlow only, and this is PyTorch: remove it; got True "
        "(bool)."
    )
    assert "parameter of PyTorch only" in _problem("tensorflow", {"partitions": 2, "ddp": True})
    assert "parameter of PyTorch only" in _problem("tensorflow", {"tensor_parallel_degree": 2})
    assert _load("tensorflow", {"tensor_parallel_degree": 1}).tensor_parallel_degree == 1


def test_alias_clash_in_one_source() -> None:
    clash = _problem(given={"partitions": 2, "pipeline_parallel_degree": 4})
    assert clash == (
        "partitions and pipeline_parallel_degree name one value: keep one of them; got 2 (int) "
        "and 4 (int)."
    )
    assert _load(given={"partitions": 2, "pipeline_parallel_degree": 2}).partitions == 2


def test_undocumented_names_are_accepted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = _load(given={"partitions": 2, "static_mode": True, "_match_weights": True})
    assert config.static_mode is True
    assert [r.args for r in caplog.records] == [("static_mode",), ("_match_weights",)]
    # Published notebooks have it where the job is started.
    launch = json.dumps({"partitions": 2, "_match_weights": True})
    assert _load(SM_HP_MP_PARAMETERS=launch).pipeline_parallel_degree == 2
    assert caplog.records[-1].args == ("_match_weights",)


def test_configuration_that_asks_for_nothing() -> None:
    assert "sets microbatches but asks for no parallelism" in _problem(given={"microbatches": 4})
    assert _load(given={"microbatches": 4, "pipeline_parallel_degree": 1}).microbatches == 4


# ---------------------------------------------------------------- sources


def test_launch_beats_init_beats_default_key_by_key() -> None:
    config = _load(
        given={"pipeline_parallel_degree": 4, "microbatches": 8, "ddp": True},
        SM_HP_MP_PARAMETERS=json.dumps({"partitions": 2, "microbatches": None}),
    )
    rows = {row.name: (row.value, row.source) for row in config.explain()}
    assert list(rows) == list(_DEFAULTS)
    assert rows["pipeline_parallel_degree"] == (2, "launch")
    assert rows["microbatches"] == (8, "init")
    assert rows["ddp"] == (True, "init")
    assert rows["fp16"] == (False, "default")


def test_explain_of_a_config_built_directly() -> None:
    rows = {row.name: row.source for row in Config(microbatches=2).explain()}
    assert rows["microbatches"] == "init"
    assert rows["ddp"] == "default"


def test_launch_as_comma_list_is_parsed_by_type() -> None:
    text = "ddp=True,microbatches=4,partitions=2,pipeline=simple,memory_weight=.5,optimize=None"
    config = _load(SM_HP_MP_PARAMETERS=text)
    assert config.ddp is True
    assert (config.microbatches, config.partitions) == (4, 2)
    assert (config.pipeline, config.memory_weight, config.optimize) == ("simple", 0.5, "memory")
    assert _problem(SM_HP_MP_PARAMETERS="ddp=yes") == "ddp must be true or false; got 'yes' (str)."
    assert "got 'two' (str)" in _problem(SM_HP_MP_PARAMETERS="partitions=two")


@pytest.mark.parametrize("text", ["", "{}", "  "])
def test_empty_launch_is_a_plain_process(text: str) -> None:
    assert _load(SM_HP_MP_PARAMETERS=text) == _load()


@pytest.mark.parametrize("text", ["{bad", "ddp", "ddp=True,partitions", "[1]"])
def test_malformed_launch(text: str) -> None:
    assert _problem(SM_HP_MP_PARAMETERS=text).startswith("SM_HP_MP_PARAMETERS must be")


def test_files(tmp_path: Path) -> None:
    as_yaml = tmp_path / "config.yaml"
    as_yaml.write_text("ddp: true\nsdp_reduce_bucket_size: 5e8\nsharded_data_parallel_degree: 2\n")
    assert _load(given=as_yaml).sdp_reduce_bucket_size == 500_000_000
    as_json = tmp_path / "config.json"
    as_json.write_text('{"partitions": 2}')
    assert _load(given=str(as_json)).partitions == 2
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert _load(given=empty) == _load()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("c.json", "{", "cannot be read"),
        ("c.yaml", "a: [", "cannot be read"),
        ("c.yaml", "- 1", "must be a dictionary of parameters; got [1] (list)"),
        ("absent.yaml", None, "cannot be read"),
    ],
)
def test_malformed_files(tmp_path: Path, name: str, content: str | None, text: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    problem = _problem(given=path)
    assert text in problem
    assert str(path) in problem


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize("text", [DEEP, DEEP + "1" + "}" * 100_000], ids=["open", "closed"])
@pytest.mark.parametrize("name", ["c.json", "c.yaml"])
def test_what_is_nested_too_deep_cannot_be_read(tmp_path: Path, name: str, text: str) -> None:
    problem = _problem(SM_HP_MP_PARAMETERS=text)
    assert problem.startswith("SM_HP_MP_PARAMETERS must be a JSON object")
    assert len(problem) < 1000
    (tmp_path / name).write_text(text[:20_000] if name == "c.yaml" else text)
    assert "cannot be read" in _problem(given=tmp_path / name)


def test_a_deep_value_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert "a deeply nested value (dict)" in _problem(given={"partitions": deep})


def test_given_of_another_type() -> None:
    assert "must be a dictionary of parameters; got 3 (int)" in _problem(given=3)


# ---------------------------------------------------------------- envelope


def _nested(parameters: Any = None, **extra: Any) -> dict[str, Any]:
    inner = {"enabled": True, "parameters": parameters or {"partitions": 2}}
    return {"smdistributed": {"modelparallel": inner}, **extra}


def test_nested_envelope() -> None:
    assert _load(given=_nested()).partitions == 2
    mpi = {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x 'A=b c'"}
    assert _load(given=_nested(mpi=mpi)).partitions == 2


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: {"smdistributed": d}])
def test_flat_envelope_is_accepted_with_a_warning(wrap: Any) -> None:
    flat = wrap({"enabled": True, "parameters": {"partitions": 2}})
    with pytest.warns(ConfigWarning, match="smdistributed.modelparallel"):
        assert _load(given=flat).partitions == 2


def test_disabled_envelope_is_a_plain_process() -> None:
    inner = {"enabled": False, "parameters": {"partitions": 2}}
    assert _load(given={"smdistributed": {"modelparallel": inner}}) == _load()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"smdistributed": {"modelparallel": {"parameters": {}}}},
            "smdistributed.modelparallel.enabled must be true or false; it is missing.",
        ),
        (
            {"smdistributed": {"modelparallel": {"enabled": True}}},
            "smdistributed.modelparallel.parameters must be a dictionary; it is missing.",
        ),
        (
            {"smdistributed": {"modelparallel": {"enabled": 1, "parameters": {}}}},
            "smdistributed.modelparallel.enabled must be true or false; got 1 (int).",
        ),
        (
            {"smdistributed": {"modelparallel": {"enabled": True, "parameters": 3}}},
            "smdistributed.modelparallel.parameters must be a dictionary; got 3 (int).",
        ),
        (
            {
                "smdistributed": {
                    "modelparalel": {},
                    "modelparallel": {"enabled": False, "parameters": {}},
                }
            },
            "smdistributed.modelparalel is not a known parameter; did you mean modelparallel",
        ),
        (_nested(mip={}), "mip is not a known parameter; did you mean mpi"),
        (
            {"smdistributed": {**_nested()["smdistributed"], "dataparallel": {"enabled": True}}},
            "smdistributed.modelparallel.enabled and smdistributed.dataparallel.enabled exclude",
        ),
        (
            _nested(mpi={"enabled": False, "processes_per_host": 2}),
            "smdistributed.modelparallel.enabled needs mpi.enabled true and "
            "mpi.processes_per_host; got mpi.enabled False.",
        ),
        (
            _nested(mpi={"enabled": True}),
            "needs mpi.enabled true and mpi.processes_per_host; got mpi.processes_per_host None.",
        ),
        (
            _nested(mpi={"enabled": True, "processes_per_host": 0}),
            "mpi.processes_per_host must be an integer, at least 1; got 0 (int).",
        ),
        (
            _nested(mpi={"enabled": True, "processes_per_host": 1, "process_per_host": 2}),
            "mpi.process_per_host is not a known parameter; did you mean processes_per_host",
        ),
        (
            _nested(mpi={"enabled": True, "processes_per_host": 1, "custom_mpi_options": "-x 'A"}),
            'mpi.custom_mpi_options must be flags of mpirun, quoted as in a shell; got "-x \'A"',
        ),
    ],
)
def test_wrong_envelopes(given: dict[str, Any], text: str) -> None:
    assert text in _problem(given=given)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (
            {"tensor_parallel_degree": 2},
            ["tensor_parallel_degree above 1 needs ddp", "tensor_parallel_degree 2, ddp False"],
        ),
        (
            {"expert_parallel_degree": 2, "tensor_parallel_degree": 4, "ddp": True},
            ["expert_parallel_degree above 1 and tensor_parallel_degree must be equal"],
        ),
        ({"expert_parallel_degree": 2}, ["expert_parallel_degree above 1 needs ddp"]),
        ({"expert_parallel_degree": 0}, ["expert_parallel_degree must be an integer, at least 1"]),
        (
            {"context_parallel_degree": 2},
            ["context_parallel_degree above 1 needs ddp: set it to true"],
        ),
        (
            {"context_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2},
            ["and tensor_parallel_degree are not both above 1 yet, since slices gather"],
        ),
        (
            {"partitions": 2, "auto_partition": False},
            ["auto_partition false needs default_partition"],
        ),
        (
            {
                "partitions": 2,
                "auto_partition": False,
                "default_partition": 0,
                "pipeline": "zero_bubble_v",
            },
            ["pipeline zero_bubble_v is a partition that the library makes: set auto_partition"],
        ),
        (
            {"partitions": 2, "default_partition": 2},
            ["between 0 and partitions - 1", "default_partition 2, partitions 2"],
        ),
        ({"sharded_data_parallel_degree": 2}, ["sharded_data_parallel_degree above 1 needs ddp"]),
        ({**_SHARDED, "shard_optimizer_state": True}, ["set shard_optimizer_state to false"]),
        ({"ddp": True, "fp16": True, "bf16": True}, ["fp16 and bf16 exclude each other"]),
        (
            {"partitions": 2, "shard_optimizer_state": True},
            ["shard_optimizer_state needs ddp", "shard_optimizer_state True, ddp False"],
        ),
        (
            {"auto": True, "partitions": 2},
            ["auto true decides partitions: leave one of them out", "auto True, partitions 2"],
        ),
    ],
)
def test_rules_between_parameters(given: dict[str, object], parts: list[str]) -> None:
    problem = _problem(given=given)
    for part in parts:
        assert part in problem


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_degree": 2, "ddp": True},
        {"context_parallel_degree": 2, "ddp": True, "microbatches": 4},
        {"partitions": 2, "auto_partition": False, "default_partition": 0},
        {**_SHARDED, "tensor_parallel_degree": 2},
        {"ddp": True, "bf16": True},
        {"ddp": True, "shard_optimizer_state": True},
        {"partitions": 2, "active_microbatches": 64},
        {"partitions": 1, "prescaled_batch": True},
        {"partitions": 1, "memory_weight": 0.0},
        {"partitions": 2, "offload_activations": True, "activation_loading_horizon": 2},
        {"auto": True, "bf16": True, "ddp": True},
    ],
)
def test_combinations_that_are_allowed(given: dict[str, object]) -> None:
    config = _load(given=given)
    for name, value in given.items():
        assert getattr(config, name) == value


def test_a_rule_is_skipped_when_its_parameter_is_wrong_by_itself() -> None:
    assert _problem(given={"tensor_parallel_degree": 2, "ddp": "yes"}).startswith("ddp must be")


@pytest.mark.parametrize(
    "name", [name for name in _DEFAULTS if name.startswith("sdp_")] + ["activation_loading_horizon"]
)
def test_parameters_without_effect_are_warned_about(name: str) -> None:
    with pytest.warns(ConfigWarning, match=f"^{name} has an effect only with"):
        _load(given={"partitions": 2, name: _DEFAULTS[name]})


@pytest.mark.parametrize("pipeline", ["zero_bubble", "zero_bubble_v", "auto"])
def test_our_schedules_are_an_error_under_tensorflow(pipeline: str) -> None:
    assert load("pytorch", {"partitions": 2, "pipeline": pipeline}, {}).pipeline == pipeline
    assert _problem("tensorflow", {"partitions": 2, "pipeline": pipeline}) == (
        f"pipeline must be one of interleaved, simple under TensorFlow; got {pipeline!r} (str)."
    )


def test_letters_of_placement_are_an_error_under_tensorflow() -> None:
    assert _problem("tensorflow", {"partitions": 2, "placement_strategy": "DPT"}) == (
        "placement_strategy must be one of cluster, spread under TensorFlow; got 'DPT' (str)."
    )
    spread = _load("tensorflow", {"partitions": 2, "placement_strategy": "spread"})
    assert spread.topology(4).word == "TPD"


# ---------------------------------------------------------------- number of processes


def test_topology_follows_the_configuration() -> None:
    given = {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True, "placement_strategy": "PTD"}
    assert _load(given=given).topology(8) == Topology(8, 2, 2, "PTD")


@pytest.mark.parametrize("spelling", ["partitions", "pipeline_parallel_degree"])
def test_indivisible_number_of_processes(spelling: str) -> None:
    config = _load(given={spelling: 3, "ddp": True})
    for check in (config.topology, lambda size: config.check_world(size, "pytorch")):
        with pytest.raises(ConfigError, match=rf"\(8, over all hosts\).*of {spelling} \(3\)"):
            check(8)


def test_replicas_need_ddp_under_pytorch() -> None:
    config = _load(given={"partitions": 2})
    config.check_world(2, "pytorch")
    with pytest.raises(ConfigError, match=r"8 processes hold 4 replicas .* needs ddp"):
        config.check_world(8, "pytorch")
    _load(given={"partitions": 2, "ddp": True}).check_world(8, "pytorch")
    with pytest.raises(ConfigError, match="start 1 processes"):
        _load().check_world(2, "pytorch")


def test_replicas_without_horovod_are_warned_about_under_tensorflow() -> None:
    config = _load("tensorflow", {"partitions": 2})
    config.check_world(2, "tensorflow")
    with pytest.warns(ConfigWarning, match="4 replicas of the model and horovod is false"):
        config.check_world(8, "tensorflow")


def test_horovod_must_be_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _load("tensorflow", {"partitions": 2, "horovod": True})
    found: list[object] = [None]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[0])
    with pytest.raises(ConfigError, match="install the package horovod"):
        config.check_world(4, "tensorflow")
    found[0] = object()
    config.check_world(4, "tensorflow")


def test_sharding_degree_divides_the_replicas() -> None:
    config = _load(given={"ddp": True, "sharded_data_parallel_degree": 3})
    with pytest.raises(ConfigError, match=r"the 8 ranks .* use 1, 2, 4, 8; got 3\."):
        config.check_world(8, "pytorch")
    config.check_world(3, "pytorch")


def test_tensor_groups_that_span_hosts_are_warned_about() -> None:
    given = {"tensor_parallel_degree": 4, "ddp": True}
    _load(given=given).check_world(8, "pytorch", processes_per_host=4)
    with pytest.warns(ConfigWarning, match="ranks 0, 2, 4, 6 spans hosts 0, 1"):
        _load(given={**given, "placement_strategy": "spread"}).check_world(8, "pytorch", 4)
    with pytest.warns(ConfigWarning, match="3 is not a power of two"):
        _load(given={**given, "tensor_parallel_degree": 3}).check_world(3, "pytorch", 4)


# ---------------------------------------------------------------- environment


def test_environment_variables() -> None:
    environment = _load(SMP_NCCL_THROTTLE_LIMIT="-1", MASTER_PORT="29500").environment
    assert environment.SMP_NCCL_THROTTLE_LIMIT == -1
    assert environment.MASTER_PORT == 29500
    assert environment.SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES == 16_777_216
    assert environment.SMDDP_AG_SORT_BUFFER_SIZE_BYTES == 134_217_728
    assert _load().environment.SMP_NCCL_THROTTLE_LIMIT == 8


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("SMP_NCCL_THROTTLE_LIMIT", "0", "an integer, at least 1, or -1 for no limit"),
        ("SMP_NCCL_THROTTLE_LIMIT", "x", "an integer, at least 1, or -1 for no limit"),
        ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "8191", "a multiple of 8192"),
        ("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", "1", "a multiple of 8192"),
        ("MASTER_PORT", "65536", "a TCP port, 1 to 65535"),
    ],
)
def test_wrong_environment_variables(name: str, value: str, rule: str) -> None:
    problem = _problem(**{name: value})
    assert problem.startswith(f"{name} must be ")
    assert rule in problem
    assert f"got '{value}' (str)" in problem
    assert _load("tensorflow", **{name: value}) == _load("tensorflow")


def test_a_job_that_plans_itself_is_checked_when_it_has() -> None:
    config = _load(given={"auto": True})
    config.check_world(8, "pytorch")
    with pytest.raises(ConfigError, match="needs ddp"):
        _load(given={"partitions": 2}).check_world(8, "pytorch")
    assert config.given() == {"auto": True}
    envelope = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": "auto"}}}
    mpi = {"enabled": True, "processes_per_host": 2}
    assert _load(given={**envelope, "mpi": mpi}).given() == {"auto": True}
