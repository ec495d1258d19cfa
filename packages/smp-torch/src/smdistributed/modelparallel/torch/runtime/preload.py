"""What copies of one process have from the start: all that ``smp.init`` and a first step import.

``smprun --fork`` imports it in the process that it copies. Nothing may be computed here, for what
has computed must not fork.
"""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.compat.private.below import without_memory
from smdistributed.modelparallel.torch.compat.private.importing import import_ahead
from smdistributed.modelparallel.torch.state.caches import FunctionCaches

import_ahead()


def prepare() -> None:
    """Does what the first recording of each process would, and its first absent parameter.

    That looks through all modules for caches, and registers with each operation of torch.
    """
    FunctionCaches().look_for_new()
    without_memory((), torch.float32, torch.device("cpu"))
