"""``CheckpointManager``."""

from __future__ import annotations

import os
from typing import Any

from smdistributed.modelparallel.tensorflow.api.start import slot
from smdistributed.modelparallel.tensorflow.checkpoint.manager import (
    CheckpointManager as BaseManager,
)


class CheckpointManager(BaseManager):
    """See the base class.

    Args:
        checkpoint: a ``tf.train.Checkpoint``, for example of the optimizer and the model.
        directory: where to; all processes see the same one.
        max_to_keep: number of checkpoints kept; None keeps all.
        checkpoint_name: beginning of the names.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str] = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        super().__init__(slot.get(), checkpoint, directory, max_to_keep, checkpoint_name)
