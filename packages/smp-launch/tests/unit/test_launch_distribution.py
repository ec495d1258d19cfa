"""How ``distribution=`` is checked, and handed on."""

from __future__ import annotations

from typing import Any

import pytest

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.request import distribution

MPI = {"enabled": True, "processes_per_host": 4}
PARALLEL = {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4, "ddp": True}}


def read(given: Any, count: int = 1, kind: str = "ml.p3.16xlarge") -> dict[str, Any]:
    return distribution.read(given, "pytorch", count, kind)


def test_model_parallelism_is_handed_on() -> None:
    options = "-x NCCL_DEBUG=WARN"
    given = {
        "smdistributed": {"modelparallel": PARALLEL},
        "mpi": {**MPI, "custom_mpi_options": options},
    }
    found = read(given)
    assert found == {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 4,
        "sagemaker_mpi_custom_mpi_options": options,
        "mp_parameters": PARALLEL["parameters"],
        "sagemaker_distributed_dataparallel_enabled": False,
        "sagemaker_instance_type": "ml.p3.16xlarge",
    }
    assert distribution.of_hyperparameters(found) == given


def test_a_job_that_plans_itself_is_handed_on() -> None:
    parallel = {"modelparallel": {"enabled": True, "parameters": "auto"}}
    found = read({"smdistributed": parallel, "mpi": MPI})
    assert found["mp_parameters"] == {"auto": True}


def test_mpi_alone_is_handed_on() -> None:
    found = read({"mpi": MPI})
    assert found["sagemaker_mpi_num_of_processes_per_host"] == 4
    assert "mp_parameters" not in found
    assert distribution.of_hyperparameters(found) == {"mpi": {**MPI, "custom_mpi_options": ""}}


@pytest.mark.parametrize(
    ("kind", "framework", "name"),
    [
        ("torch_distributed", "pytorch", "sagemaker_torch_distributed_enabled"),
        ("pytorchddp", "pytorch", "sagemaker_pytorch_ddp_enabled"),
        ("parameter_server", "tensorflow", "sagemaker_parameter_server_enabled"),
        (
            "multi_worker_mirrored_strategy",
            "tensorflow",
            "sagemaker_multi_worker_mirrored_strategy_enabled",
        ),
    ],
)
def test_other_starters_are_handed_on(kind: str, framework: Any, name: str) -> None:
    given = {kind: {"enabled": True}}
    found = distribution.read(given, framework, 2, "local")
    assert found == {name: True}
    assert distribution.of_hyperparameters(found) == given
    assert distribution.read({kind: {"enabled": False}}, framework, 2, "local") == {}
    other = "tensorflow" if framework == "pytorch" else "pytorch"
    with pytest.raises(ConfigError, match=f"{kind} is for {framework}; got it for {other}"):
        distribution.read(given, other, 2, "local")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"mpi and {kind} exclude each other"):
        distribution.read({**given, "mpi": MPI}, framework, 2, "local")


def test_torchrun_starts_model_parallelism_too() -> None:
    given = {
        "smdistributed": {"modelparallel": PARALLEL},
        "torch_distributed": {"enabled": True, "processes_per_host": 4},
    }
    found = read(given)
    assert found["mp_parameters"] == PARALLEL["parameters"]
    assert found["sagemaker_torch_distributed_processes_per_host"] == 4
    with pytest.raises(ConfigError, match="exclude each other"):
        read({**given, "pytorchddp": {"enabled": True}})
    for wrong in (0, True, 9):
        with pytest.raises(ConfigError, match="processes_per_host must"):
            read({"torch_distributed": {"enabled": True, "processes_per_host": wrong}})


def test_the_number_of_processes_has_a_second_spelling_and_a_default() -> None:
    also = {"enabled": True, "process_per_host": 2}
    assert read({"mpi": also}) == read({"mpi": {"enabled": True, "processes_per_host": 2}})
    # What is not given those who run the job decide: one a GPU.
    assert "sagemaker_mpi_num_of_processes_per_host" not in read({"mpi": {"enabled": True}})


@pytest.mark.parametrize("given", [None, {}, {"mpi": {"enabled": False}}])
def test_nothing_is_handed_on(given: Any) -> None:
    assert read(given) == {}
    assert distribution.of_hyperparameters({}) is None


def test_the_flat_form_is_understood() -> None:
    with pytest.warns(ConfigWarning, match="belong under smdistributed.modelparallel"):
        assert read({"smdistributed": PARALLEL, "mpi": MPI})["mp_parameters"]["partitions"] == 2


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"smdistributed": {"modelparallel": PARALLEL}}, r"needs mpi\.enabled true"),
        (
            {"smdistributed": {"modelparallel": PARALLEL}, "mpi": {"enabled": True}},
            r"processes_per_host",
        ),
        ({"mpi": {**MPI, "process_per_host": 2}}, r"did you mean processes_per_host"),
        ({"mpi": {**MPI, "processes_per_host": 0}}, r"at least 1"),
        ({"mpi": {**MPI, "processes_per_host": 9}}, r"got 9, and ml\.p3\.16xlarge has 8"),
        ({"mpi": {**MPI, "custom_mpi_options": "NCCL_DEBUG INFO"}}, r"start with '-'"),
        ({"mpy": MPI}, r"did you mean mpi"),
        (
            {
                "smdistributed": {
                    "modelparallel": {"enabled": True, "parameters": {"partions": 2}}
                },
                "mpi": MPI,
            },
            r"partions .* did you mean partitions",
        ),
        (
            {
                "smdistributed": {
                    "modelparallel": {"enabled": True, "parameters": {"partitions": 3}}
                },
                "mpi": MPI,
            },
            r"3",
        ),
        (
            {
                "smdistributed": {
                    "modelparallel": PARALLEL,
                    "dataparallel": {"enabled": True},
                },
                "mpi": MPI,
            },
            r"exclude each other",
        ),
    ],
)
def test_what_breaks_a_rule_is_an_error(given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read(given)


@pytest.mark.parametrize(
    "given",
    [
        {"instance_groups": ["a"]},
        {"smdistributed": {"dataparallel": {"enabled": True}}},
    ],
)
def test_what_is_not_offered_says_the_way_out(given: Any) -> None:
    with pytest.raises(UnsupportedError, match="is not offered"):
        read(given)
