"""What the memory of this rank's device holds."""

from __future__ import annotations

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.device_memory import measured
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport


def memory() -> MemoryReport:
    """Says what the memory of this rank's device holds, by kind, and what training will add.

    An addition of this library. Before the first update of an optimizer ``expected`` has what
    gradients and optimizer will take; what optimizers of other packages keep is taken to be 8 bytes
    a number. Activations come on top: ``smp-launch plan`` estimates these. Printed it is a table;
    ``smp.allgather(smp.memory(), smp.WORLD)`` has those of all ranks.

    Local. On a GPU what has been started is not waited for.

    Returns:
        Sizes in bytes. Kinds that have a tensor, of a model or an optimizer, are told by it, and
        the rest by what it lies in, so that together they are all that is in use.

    Raises:
        SMPError: a step function of several partitions or slices calls it.
    """
    runtime = slot.get()
    if runtime.is_in_step and runtime.topology.mp_size > 1:
        raise SMPError(
            "smp.memory is called between steps where ranks split a model: while a step function "
            "runs, parameters are stand-ins for what other ranks have. Call it before the step or "
            "after it; what a step takes at most is its attribute most."
        )
    return measured.report(runtime)
