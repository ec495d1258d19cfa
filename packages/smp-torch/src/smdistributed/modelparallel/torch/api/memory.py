"""What the memory of this rank's device holds."""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.device_memory import measured
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport
from smdistributed.modelparallel.torch.stepping.function import StepFunction


def memory(step: Any = None, *args: Any, **kwargs: Any) -> MemoryReport:
    """Says what the memory of this rank's device holds, by kind, and what training will add.

    An addition of this library. Before the first update of an optimizer ``expected`` has what
    gradients and optimizer will take; what optimizers of other packages keep is taken to be 8 bytes
    a number. What passes hold, activations in the first place, is in ``expected`` too when a step
    has been recorded: with several partitions by its first call, where the library logs at the
    level INFO; with one partition by this function, if it is given a step function and what that
    is to be called with. It is recorded as by ``smp.plan``: nothing is computed, and models
    and optimizers stay as they are. Printed a report is a table;
    ``smp.allgather(smp.memory(), smp.WORLD)`` has those of all ranks.

    Local. On a GPU what has been started is not waited for.

    Args:
        step: a function under ``smp.step`` that trains; None records nothing.
        args, kwargs: what it is called with on this rank.

    Returns:
        Sizes in bytes. Kinds that have a tensor, of a model or an optimizer, are told by it, and
        the rest by what it lies in, so that together they are all that is in use.

    Raises:
        ConfigError: ``step`` is no step function or does not train, or there are several
            partitions.
        SMPError: a step function of several partitions or slices calls it.
    """
    runtime = slot.get()
    if runtime.is_in_step and runtime.topology.mp_size > 1:
        raise SMPError(
            "smp.memory is called between steps where ranks split a model: while a step function "
            "runs, parameters are stand-ins for what other ranks have. Call it before the step or "
            "after it; what a step takes at most is its attribute most."
        )
    if step is not None:
        if not isinstance(step, StepFunction):
            raise ConfigError(
                "smp.memory takes a function under @smp.step, and the arguments of a call; "
                f"received {step!r}: decorate it."
            )
        step.foresee(args, kwargs)
    return measured.report(runtime)
