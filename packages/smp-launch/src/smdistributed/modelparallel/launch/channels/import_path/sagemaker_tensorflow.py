"""The reader of pipes, as scripts import it; jobs alone have this folder on their path."""

from smdistributed.modelparallel.launch.channels.dataset import (
    PipeModeDataset,
    PipeModeDatasetException,
)

__all__ = ["PipeModeDataset", "PipeModeDatasetException"]
