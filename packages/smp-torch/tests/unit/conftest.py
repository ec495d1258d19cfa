"""What is imported before the tests stays: the many collections in them need not look at it."""

from __future__ import annotations

import gc

from torch._subclasses.fake_tensor import FakeTensorMode

import smdistributed.modelparallel.torch as smp  # noqa: F401

# The first one imports much more.
FakeTensorMode(allow_non_fake_inputs=True)
gc.collect()
gc.freeze()
