"""The library is started before TensorFlow is, or says so."""

from __future__ import annotations

import sys

import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.comm.transport import SingleProcessTransport
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.tensorflow.runtime import runtime


class FirstOfTwo(SingleProcessTransport):
    """Stands for the transport of a job, which nobody may use."""

    size = 2


def test_a_late_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tf.keras.optimizers.Adam()
    tf.constant(1.0)
    for name in ("exit", "excepthook"):  # are replaced by the hooks of a job, and put back
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(runtime, "started_by_mpi", lambda: True)
    monkeypatch.setattr(runtime, "MPITransport", FirstOfTwo)
    slot: RuntimeSlot[runtime.TFRuntime] = RuntimeSlot()
    with pytest.raises(SMPError, match=r"call smp\.init first, also before optimizers"):
        runtime.start(slot, {"pipeline_parallel_degree": 2})
    assert not slot.is_filled
