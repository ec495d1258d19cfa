"""The one place that holds the state of this process."""

from __future__ import annotations

from smdistributed.modelparallel.common.facade import Facade
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

slot: RuntimeSlot[TorchRuntime] = RuntimeSlot()
facade = Facade(slot)
