"""What is around a step and takes part in its passes, which captured ones would leave out."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.compat.private.backward import saved_tensors_hooks
from smdistributed.modelparallel.torch.compat.private.modes import is_watched_by_others


def takes_part() -> str:
    """Returns what runs besides the passes of a step that is called here; "" if nothing does."""
    if saved_tensors_hooks() is not None:
        return "hooks of saved tensors are around it"
    if is_watched_by_others():
        return "a mode or transform of torch is around it"
    if torch.is_anomaly_enabled():
        return "anomalies are looked for"
    return ""
