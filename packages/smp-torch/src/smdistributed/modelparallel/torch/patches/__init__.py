"""Functions that the documented API keeps under ``patches``."""

from smdistributed.modelparallel.torch.patches import checkpoint

__all__ = ["checkpoint"]
