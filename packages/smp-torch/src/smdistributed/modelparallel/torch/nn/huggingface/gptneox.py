"""Compatibility: translations of GPT-NeoX; see the package."""

from smdistributed.modelparallel.torch.later import translations

__getattr__ = translations(__name__)
