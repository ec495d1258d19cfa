"""Compatibility: the fused optimizers, none of which is there yet.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from torch.optim import Optimizer

from smdistributed.modelparallel.torch.compat.later import later_class

FusedAdam = later_class("smp.optimizers.FusedAdam", Optimizer, "use torch.optim.AdamW")
FusedLamb = later_class("smp.optimizers.FusedLamb", Optimizer, "use torch.optim.AdamW")
FusedLAMB = FusedLamb
FusedNovoGrad = later_class("smp.optimizers.FusedNovoGrad", Optimizer, "use torch.optim.AdamW")

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
