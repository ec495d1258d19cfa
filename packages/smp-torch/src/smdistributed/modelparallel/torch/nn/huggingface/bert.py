"""Compatibility: translations of BERT; see the package."""

from smdistributed.modelparallel.torch.later import translations

__getattr__ = translations(__name__)
