from __future__ import annotations

import socket

import pytest

from smdistributed.modelparallel.common.comm.addresses import listen_at


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_job_of_one_host_listens_on_the_loopback_alone(host: str) -> None:
    with listen_at(host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(("address", "place"), [("127.0.1.1", "::"), ("192.0.2.1", "::")])
def test_what_only_other_hosts_can_resolve_is_listened_for_on_all(
    address: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: address)
    with listen_at("node1", 0) as listener:
        assert listener.getsockname()[0] in (place, "0.0.0.0")


def test_a_port_in_use_is_an_error() -> None:
    with listen_at("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", listener.getsockname()[1])
