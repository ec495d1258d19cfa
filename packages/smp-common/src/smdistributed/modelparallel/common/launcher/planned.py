"""A job that plans itself: rank 0 records a step in a process of its own, and all take the plan.

Only the script knows the model, and ranks must agree before it has made one. So the script runs
twice on rank 0, the first time as one process that ends where it would train.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from smdistributed.modelparallel.common import config as configuration
from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.comm.transport import Transport
from smdistributed.modelparallel.common.config import Config, Framework
from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.search.devices import Machine, device_like, device_of
from smdistributed.modelparallel.common.search.plan import Plan
from smdistributed.modelparallel.common.topology import Topology

#: What launchers tell a rank of its job.
_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LINES = 3

#: Returns the GPU of this process as its driver names it, and its bytes, None where only its data
#: sheet says them; None where there is no GPU.
DescribeGpu = Callable[[Transport], tuple[str, int | None] | None]


def planned(
    framework: Framework, asked: Config, transport: Transport, describe_gpu: DescribeGpu
) -> Config:
    """Returns the configuration that a job takes which asks for a plan.

    Collective: every process, before any group is built.

    Args:
        framework: of the job.
        asked: what the script and its launcher give, ``auto`` among it.
        transport: the way to the other processes.
        describe_gpu: is asked on rank 0.

    Raises:
        ConfigError: nothing fits, or rank 0 cannot plan; on every rank.
    """
    chosen: Mapping[str, Any] | None = None
    problem = ""
    if transport.rank == 0:
        try:
            chosen = _best(transport, describe_gpu)
        except SMPError as error:
            problem = str(error)
    if transport.size > 1:
        everyone = Topology(transport.size, 1, 1)
        communicator = Communicator(transport, everyone, asked.communication_timeout)
        chosen, problem = communicator.allgather((chosen, problem), CommGroup.WORLD)[0]
    if chosen is None:
        raise ConfigError(f"auto true has rank 0 plan the job first, which failed: {problem}")
    given = {name: value for name, value in asked.given().items() if name != "auto"}
    return configuration.load(framework, {**given, **chosen}, environ={**os.environ, **_UNSAID})


#: What the launcher said is in what is given already.
_UNSAID = {"SM_HP_MP_PARAMETERS": ""}


def _best(transport: Transport, describe_gpu: DescribeGpu) -> Mapping[str, Any]:
    """Plans, prints the plan, and returns the parameters of its first line."""
    from smdistributed.modelparallel.common.launcher.plan import recorded  # rich takes its time

    machine = _machine(transport, describe_gpu(transport))
    environ = {k: v for k, v in os.environ.items() if not _is_of_rank(k)}
    plan = Plan(recorded(_program(), environ, machine.device.name), machine, _LINES)
    best = plan.best
    print(f"{plan.table()}\n\nsmp.init takes the first line: {dict(best.changes)}", flush=True)
    return best.changes


def _program() -> list[str]:
    """Returns the words that start the script of this process once more.

    Raises:
        ConfigError: there is no script, as in a notebook.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if not os.path.isfile(getattr(main, "__file__", None) or ""):
        raise ConfigError(
            "auto true runs the script once more to record a step; this process has no file of a "
            "script: put the code into one, or call smp.plan and give smp.init what it says."
        )
    return [os.path.abspath(main.__file__ or ""), *sys.argv[1:]]


def _is_of_rank(variable: str) -> bool:
    return variable.startswith(_OF_LAUNCHERS) or variable in _OF_RANKS


def _machine(transport: Transport, gpu: tuple[str, int | None] | None) -> Machine:
    """Returns the devices of this job, which are taken to be like that of rank 0.

    Args:
        transport: knows how many processes there are, and on how many hosts.
        gpu: what ``DescribeGpu`` returns.
    """
    num_hosts, left = divmod(transport.size, transport.local_size)
    if left:
        raise ConfigError(
            "a plan is for hosts that have equally many processes; received "
            f"{transport.local_size} of {transport.size} on that of rank 0: start as many on each, "
            "or give the degrees."
        )
    of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device, num_bytes = device_of("cpu"), of_host // transport.local_size
    if gpu is not None:
        device = device_like(gpu[0])
        num_bytes = gpu[1] or device.memory_bytes or num_bytes
    return Machine(device, transport.size, num_hosts, num_bytes)
