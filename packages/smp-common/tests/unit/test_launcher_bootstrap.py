"""What each rank puts right before the program runs."""

from __future__ import annotations

import json

import pytest

from smdistributed.modelparallel.common.launcher import bootstrap

TWO = json.dumps(["algo-1", "algo-2"])
OWN = ("SM_CURRENT_HOST", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
BEFORE = ("first", "9", "9")


@pytest.mark.parametrize(
    ("rank", "hosts", "size", "wanted"),
    [
        (0, TWO, "4", ("algo-1", "0", "2")),
        (1, TWO, "4", ("algo-1", "1", "2")),
        (2, TWO, "4", ("algo-2", "0", "2")),
        (3, TWO, "4", ("algo-2", "1", "2")),
        # Not shared evenly, fewer ranks than hosts, no list, no hosts: as it was.
        (2, TWO, "3", BEFORE),
        (0, TWO, "1", BEFORE),
        (0, "algo-1", "4", BEFORE),
        (0, "[]", "4", BEFORE),
        (0, "7", "4", BEFORE),
    ],
)
def test_each_rank_knows_its_host(
    monkeypatch: pytest.MonkeyPatch, rank: int, hosts: str, size: str, wanted: tuple[str, ...]
) -> None:
    monkeypatch.setattr(bootstrap, "rank", lambda: rank)
    environ = {"SM_HOSTS": hosts, "OMPI_COMM_WORLD_SIZE": size}
    environ.update(zip(OWN, BEFORE, strict=True))
    bootstrap.name_host(environ)
    assert tuple(environ[name] for name in OWN) == wanted


def test_without_hosts_nothing_is_named() -> None:
    environ = {"OMPI_COMM_WORLD_SIZE": "4"}
    bootstrap.name_host(environ)
    assert environ == {"OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize(("rank", "wanted"), [("0", "/first"), ("1", "/first"), ("2", "/own")])
def test_a_host_has_variables_of_its_own(
    monkeypatch: pytest.MonkeyPatch, rank: str, wanted: str
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    environ = {
        "SM_HOSTS": '["algo-1", "algo-2"]',
        "OMPI_COMM_WORLD_SIZE": "4",
        "SM_CHANNEL_TRAIN": "/first",
        bootstrap.HOSTS_VARIABLE: '{"algo-2": {"SM_CHANNEL_TRAIN": "/own"}}',
    }
    bootstrap.name_host(environ)
    assert environ["SM_CHANNEL_TRAIN"] == wanted
