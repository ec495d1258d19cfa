"""How processes of a job that MPI does not start find each other: torchrun, and ``TF_CONFIG``.

Source: estimator interface, section 3 (parameter servers); TensorFlow's guides of
``ParameterServerStrategy`` and ``MultiWorkerMirroredStrategy``.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.launch.request import hyperparameters as names

_HERE = "127.0.0.1"


@dataclass(frozen=True)
class Role:
    """What a process of a cluster is.

    Attributes:
        host: the number of its host, from 0.
        name: added to the name of the host in the name of its log.
        starter: the words before the script.
        variables: its own.
        serves: whether it goes on for ever, and ends when the others are done.
    """

    host: int
    name: str
    starter: tuple[str, ...]
    variables: Mapping[str, str]
    serves: bool = False


def roles(values: Mapping[str, Any], nodes: Sequence[str], num_gpus: int) -> list[Role]:
    """Returns the processes of a job, or of each of its hosts.

    Args:
        values: all hyperparameters.
        nodes: the name of each host's node; empty where all hosts are this machine.
        num_gpus: of a host.
    """
    count = len(nodes)
    python = (sys.executable, "-u")
    if values.get(names.TORCH_DISTRIBUTED) or values.get(names.TORCH_DDP):
        return _torchrun(nodes, values.get(names.TORCH_PROCESSES), num_gpus)
    if count == 1:
        return [Role(0, "", python, {})]
    if values.get(names.MULTI_WORKER):
        (workers,) = _addresses(nodes, 1)
        return [
            Role(index, "", python, _tf_config({"worker": workers}, "worker", index))
            for index in range(count)
        ]
    if values.get(names.PARAMETER_SERVER):
        return _parameter_servers(nodes, python)
    return [Role(index, "", python, {}) for index in range(count)]


def meeting_point(nodes: Sequence[str]) -> dict[str, str]:
    """Returns the variables by which scripts of a ``ModelTrainer`` find the first host.

    Args:
        nodes: the name of each host's node; empty where all hosts are this machine.
    """
    return {"SM_MASTER_ADDR": nodes[0] or _HERE, "SM_MASTER_PORT": str(_free_ports(1)[0])}


def _torchrun(nodes: Sequence[str], processes: int | None, num_gpus: int) -> list[Role]:
    common = (
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}"),
        f"--nproc-per-node={processes or max(1, num_gpus)}",
        *(f"--master-addr={nodes[0] or _HERE}", f"--master-port={_free_ports(1)[0]}"),
    )
    # After two dashes: else torchrun takes the script's arguments that begin like its own.
    starters = [(*common, f"--node-rank={rank}", "--") for rank in range(len(nodes))]
    return [Role(rank, "", starter, {}) for rank, starter in enumerate(starters)]


def _parameter_servers(nodes: Sequence[str], python: tuple[str, ...]) -> list[Role]:
    """The first host has the chief, each other one a worker, and every one a parameter server."""
    workers, servers = _addresses(nodes, 2)
    cluster = {"chief": workers[:1], "worker": workers[1:], "ps": servers}
    tasks = [("chief", 0), *(("worker", index) for index in range(len(nodes) - 1))]
    return [
        *(
            Role(host, "", python, _tf_config(cluster, *task), serves=task[0] != "chief")
            for host, task in enumerate(tasks)
        ),
        *(
            Role(host, "-ps", python, _tf_config(cluster, "ps", host), serves=True)
            for host in range(len(nodes))
        ),
    ]


def _tf_config(cluster: Mapping[str, Sequence[str]], task: str, index: int) -> dict[str, str]:
    config = {
        "cluster": {name: list(found) for name, found in cluster.items()},
        "task": {"type": task, "index": index},
        "environment": "cloud",
    }
    return {"TF_CONFIG": json.dumps(config)}


def _addresses(nodes: Sequence[str], each: int) -> list[list[str]]:
    """Returns lists of an address a node; ports are free on this host, and likely on others."""
    ports = iter(_free_ports(each * len(nodes)))
    return [[f"{node or _HERE}:{next(ports)}" for node in nodes] for _ in range(each)]


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server((_HERE, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
