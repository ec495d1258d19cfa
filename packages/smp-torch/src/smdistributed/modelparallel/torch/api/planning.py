"""Planning a job from the script that is to run in it."""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.search.devices import USUAL_DEVICE, Machine
from smdistributed.modelparallel.common.search.plan import Plan
from smdistributed.modelparallel.torch.stepping.function import StepFunction


def plan(
    step: Any,
    *args: Any,
    devices: int,
    device: str | None = None,
    memory: str | None = None,
    hosts: int = 1,
    lines: int = 10,
    **kwargs: Any,
) -> Plan:
    """Says which configurations of a job fit, and estimates which is the fastest.

    An addition of this library. Records a call of a step function, as the first step of a job is
    recorded, and computes nothing of the model; models and optimizers stay as they are. A
    model that this
    process has made takes its memory: for one that is too large here, run the script by
    ``smp-launch plan``, which gives delayed parameters none.

    Local: a process alone, as when the script is started by ``python``. Call it after ``smp.init``,
    ``smp.DistributedModel`` and ``smp.DistributedOptimizer``.

    Shape: a tensor argument of (batch, ...) is the batch of all replicas together, where a job
    gives each replica its share.

    Args:
        step: a function under ``smp.step`` that trains one model, with ``model.backward``.
        args, kwargs: what it is called with. An argument that is named like one of the following
            goes by position.
        devices: of the job, one for each process.
        device: their kind: "h100", "h200", "a100", "l40s" or "cpu"; None for the GPU of this
            process, or "h100" where it has none. On a device of that kind operations of the step
            are timed, on numbers of no meaning; elsewhere a data sheet says what they take.
        memory: of a device, as "80GiB" or "80GB"; None for what its data sheet says.
        hosts: that have equally many of the devices.
        lines: of the plan, at most.

    Returns:
        What fits, ranked. ``plan.best.config`` is for ``smp.init``, ``plan.table()`` text for
        people, ``plan.save(path)`` writes JSON. Times are seconds, sizes bytes.

    Raises:
        ConfigError: several processes run, ``step`` is no step function or does not train, there
            is no such machine, or the batch cannot be shared out on it.
        UnsupportedError: the step trains several models.
    """
    if not isinstance(step, StepFunction):
        raise ConfigError(
            "smp.plan takes a function under @smp.step, and the arguments of a call; received "
            f"{step!r}: decorate it."
        )
    if lines < 1:
        raise ConfigError(f"a plan has at least 1 line; received lines={lines}.")
    Machine.of(device or USUAL_DEVICE, devices, hosts, memory)  # raises before anything is recorded
    profile = step.profile(args, kwargs, device or "")
    kind = device or profile.timed_on or USUAL_DEVICE
    return Plan(profile, Machine.of(kind, devices, hosts, memory), lines)
