"""Compatibility: translations of GPT-J; see the package."""

from smdistributed.modelparallel.torch.later import translations

__getattr__ = translations(__name__)
