"""What other files have imported stays: the many collections in tests need not look at it."""

from __future__ import annotations

import gc

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

import smdistributed.modelparallel.torch as smp  # noqa: F401

# The first one imports much more.
FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture(scope="module", autouse=True)
def _without_what_was_there() -> None:
    gc.collect()
    gc.freeze()
