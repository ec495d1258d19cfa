"""Addresses at which the processes of a job reach each other outside of a transport."""

from __future__ import annotations

import errno
import socket

from smdistributed.modelparallel.common.comm.transport import Transport


def own_address(transport: Transport) -> str:
    """Returns a name or address of this host that all processes of the job can reach."""
    if transport.is_one_machine:
        return "127.0.0.1"
    return socket.getfqdn()


def listen_at(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this host, and nowhere else.

    A name that this host takes for its own loopback may be another address elsewhere: there, and
    where the address is not one of this host's, it listens on all.

    Args:
        host: name or address, as other processes of the job get it.
        port: 0 for any.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    if address.startswith("127.") and host not in ("localhost", address):
        address = ""
    try:
        if address:
            return socket.create_server((address, port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def free_port() -> int:
    """Returns a port of this host that nothing listens on at present."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
