"""Modules of PyTorch that ``smp.init`` and a first step import."""

from __future__ import annotations

import torch._dynamo
import torch._inductor.compile_fx
import torch._subclasses.schema_check_mode
import torch.profiler
from torch._subclasses.fake_tensor import FakeTensorMode


def import_ahead() -> None:
    """Imports what these import when they are first used."""
    FakeTensorMode(allow_non_fake_inputs=True)
    torch._dynamo.list_backends()
