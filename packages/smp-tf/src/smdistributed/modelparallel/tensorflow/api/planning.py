"""Planning a job from the script that is to run in it."""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.plan import Plan
from smdistributed.modelparallel.tensorflow.stepping.function import StepFunction


def plan(
    step: Any,
    *args: Any,
    devices: int,
    device: str = "h100",
    memory: str | None = None,
    hosts: int = 1,
    lines: int = 10,
    **kwargs: Any,
) -> Plan:
    """Says which configurations of a job fit, and estimates which is the fastest.

    An addition of this library. Makes the graph of a call of a step function, as the first step of
    a job does, and computes nothing; models and optimizers stay as they are, but for variables that
    the first call makes, and post-partition hooks, which run. A script that is not to be changed is
    planned for by ``smp-launch plan``.

    Local: a process alone, as when the script is started by ``python``. Call it after ``smp.init``,
    ``smp.DistributedModel`` and the optimizer.

    Shape: a tensor argument of (batch, ...) is the batch of all replicas together, where a job
    gives each replica its share.

    Args:
        step: a function under ``smp.step`` that trains one model: its gradients are asked for in
            it.
        args, kwargs: what it is called with. An argument that is named like one of the following
            goes by position.
        devices: of the job, one for each process.
        device: their kind: "h100", "h200", "a100", "l40s" or "cpu".
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
    machine = Machine.of(device, devices, hosts, memory)
    profile = step.profile(args, kwargs)
    if profile is None:
        raise ConfigError(
            f"a plan is for a step that trains; {step.name} asks for no gradients: have a "
            "tf.GradientTape in it."
        )
    return Plan(profile, machine, lines)
