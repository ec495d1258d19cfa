"""What copies of one process have from the start: all that ``smp.init`` and a first step import.

``smprun --fork`` imports it in the process that it copies. Nothing may be computed here, for what
has computed must not fork.
"""

from __future__ import annotations

import torch._dynamo
import torch._inductor.compile_fx
import torch._subclasses.schema_check_mode
import torch.profiler
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.torch.compat.private.below import without_memory
from smdistributed.modelparallel.torch.record.caches import FunctionCaches

# The first of these import much more.
FakeTensorMode(allow_non_fake_inputs=True)
torch._dynamo.list_backends()


def prepare() -> None:
    """Does what the first recording of each process would, and its first absent parameter.

    That looks through all modules for caches, and registers with each operation of torch.
    """
    FunctionCaches().look_for_new()
    without_memory((), torch.float32, torch.device("cpu"))
