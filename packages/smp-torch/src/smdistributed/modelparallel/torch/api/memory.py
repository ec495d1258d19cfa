"""What the memory of this rank's device holds."""

from __future__ import annotations

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
    """
    return measured.report(slot.get())
