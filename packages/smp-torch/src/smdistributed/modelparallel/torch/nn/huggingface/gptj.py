"""Compatibility: translations of GPT-J; see the package."""

from smdistributed.modelparallel.torch.compat.later import translations

__getattr__ = translations(__name__)
