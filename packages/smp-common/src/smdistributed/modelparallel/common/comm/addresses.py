"""Addresses at which the processes of a job reach each other outside of a transport."""

from __future__ import annotations

import socket

from smdistributed.modelparallel.common.comm.transport import Transport


def own_address(transport: Transport) -> str:
    """Returns a name or address of this host that all processes of the job can reach."""
    if transport.local_size == transport.size:
        return "127.0.0.1"
    return socket.getfqdn()


def free_port() -> int:
    """Returns a port of this host that nothing listens on at present."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
