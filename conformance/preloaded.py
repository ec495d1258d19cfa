"""What copies of one process have from the start: the libraries below PyTorch's package.

Nothing may be computed here, for what has computed must not fork.
"""

from __future__ import annotations

import numpy as np  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.profiler  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

# The first one imports much more.
FakeTensorMode(allow_non_fake_inputs=True)
