"""How processes find each other that MPI does not start."""

from __future__ import annotations

import json
import sys
from typing import Any

from smdistributed.modelparallel.launch.job import clusters
from smdistributed.modelparallel.launch.job.clusters import Role

HERE = ["", "", ""]


def config_of(role: Role) -> Any:
    return json.loads(role.variables["TF_CONFIG"])


def test_a_plain_script_is_told_nothing() -> None:
    for values in ({}, {"sagemaker_parameter_server_enabled": False}):
        found = clusters.roles(values, ["", ""], 0)
        assert [(role.host, role.starter, role.variables) for role in found] == [
            (0, (sys.executable, "-u"), {}),
            (1, (sys.executable, "-u"), {}),
        ]


def test_workers_are_listed_in_the_order_of_hosts() -> None:
    found = clusters.roles({"sagemaker_multi_worker_mirrored_strategy_enabled": True}, HERE, 0)
    configs = [config_of(role) for role in found]
    assert [each["task"] for each in configs] == [
        {"type": "worker", "index": index} for index in range(3)
    ]
    (cluster,) = {json.dumps(each["cluster"]) for each in configs}
    workers = json.loads(cluster)["worker"]
    assert len(set(workers)) == 3
    assert all(each.startswith("127.0.0.1:") for each in workers)
    assert not any(role.serves for role in found)


def test_every_host_has_a_parameter_server_and_the_first_the_chief() -> None:
    found = clusters.roles({"sagemaker_parameter_server_enabled": True}, ["n1", "n2"], 0)
    tasks = [(role.host, role.name, *config_of(role)["task"].values()) for role in found]
    assert tasks == [
        (0, "", "chief", 0),
        (1, "", "worker", 0),
        (0, "-ps", "ps", 0),
        (1, "-ps", "ps", 1),
    ]
    assert [role.serves for role in found] == [False, True, True, True]
    cluster = config_of(found[0])["cluster"]
    hosts = {kind: [each.partition(":")[0] for each in where] for kind, where in cluster.items()}
    assert hosts == {"chief": ["n1"], "worker": ["n2"], "ps": ["n1", "n2"]}
    assert len({each for where in cluster.values() for each in where}) == 4


def test_one_host_needs_no_cluster() -> None:
    for name in ("parameter_server", "multi_worker_mirrored_strategy"):
        (role,) = clusters.roles({f"sagemaker_{name}_enabled": True}, [""], 0)
        assert not role.variables


def test_torchrun_runs_on_each_host() -> None:
    values = {"sagemaker_torch_distributed_enabled": True}
    first, second = clusters.roles(values, ["n1", "n2"], 4)
    words = first.starter[1:]
    assert words[:2] == ("-m", "torch.distributed.run")
    assert {"--nnodes=2", "--nproc-per-node=4", "--master-addr=n1", "--node-rank=0"} < set(words)
    assert second.starter[:-2] == first.starter[:-2], "all meet at one port"
    assert words[-1] == "--", "what follows is the script's, whatever it is called"
    assert second.starter[-2] == "--node-rank=1"
    assert not first.variables
    chosen = {**values, "sagemaker_torch_distributed_processes_per_host": 2}
    (alone,) = clusters.roles(chosen, [""], 0)
    assert "--nproc-per-node=2" in alone.starter
