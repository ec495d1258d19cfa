"""What a launcher says in the environment of a process, where it is wrong."""

from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.comm.mpi import check_size
from smdistributed.modelparallel.common.comm.transport import started_by_torchrun
from smdistributed.modelparallel.common.errors import CommError, ConfigError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_the_variables_of_torchrun() -> None:
    assert started_by_torchrun(TORCHRUN)
    assert started_by_torchrun({**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert started_by_torchrun({**TORCHRUN, "LOCAL_RANK": "1"})
    for name in TORCHRUN:
        assert not started_by_torchrun({key: TORCHRUN[key] for key in TORCHRUN if key != name})
    assert not started_by_torchrun({**TORCHRUN, "RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "5", "RANK must be an integer from 0 to 1; received '5'."),
        ("RANK", "-1", "RANK must be an integer from 0 to 1; received '-1'."),
        ("RANK", "x", "RANK must be an integer from 0 to 1; received 'x'."),
        ("RANK", "", "received ''."),
        ("WORLD_SIZE", "0", "WORLD_SIZE must be an integer of at least 1; received '0'."),
        ("WORLD_SIZE", "two", "received 'two'."),
        ("MASTER_PORT", "99999", "MASTER_PORT must be an integer from 0 to 65535; received"),
        ("LOCAL_RANK", "2", "LOCAL_RANK must be an integer from 0 to 1; received '2'."),
        ("LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE must be an integer from 1 to 2; received '3'."),
    ],
)
def test_wrong_variables_of_torchrun(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        started_by_torchrun({**TORCHRUN, name: value})
    assert text in str(raised.value)
    assert "torchrun or smprun" in str(raised.value)


def test_an_mpi_that_knows_one_process_of_several() -> None:
    check_size(2, {"OMPI_COMM_WORLD_SIZE": "2"}, "MPICH 4")
    check_size(1, {"OMPI_COMM_WORLD_SIZE": "1"}, "MPICH 4")
    check_size(1, {}, "MPICH 4")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        with pytest.raises(CommError) as raised:
            check_size(1, {name: "2"}, "MPICH Version: 4\0\nMPICH Release: today\n")
        assert f"the launcher started 2 processes ({name})" in str(raised.value)
        assert "MPICH Version: 4, knows this one alone. Start" in str(raised.value)
