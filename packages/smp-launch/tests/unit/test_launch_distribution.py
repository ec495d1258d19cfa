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


def test_mpi_alone_is_handed_on() -> None:
    found = read({"mpi": MPI})
    assert found["sagemaker_mpi_num_of_processes_per_host"] == 4
    assert "mp_parameters" not in found
    assert distribution.of_hyperparameters(found) == {"mpi": {**MPI, "custom_mpi_options": ""}}


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
        {"parameter_server": {"enabled": True}},
        {"torch_distributed": {"enabled": True}},
        {"smdistributed": {"dataparallel": {"enabled": True}}},
    ],
)
def test_what_is_not_offered_says_the_way_out(given: Any) -> None:
    with pytest.raises(UnsupportedError, match="is not offered"):
        read(given)
