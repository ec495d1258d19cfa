"""Optimizers that stand for those of apex, which do not work over partitions.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions;
model-parallel-customize-training-script-pt.md, Unsupported Framework Features.
"""

from smdistributed.modelparallel.torch.optimizers.fused_adam import FusedAdam
from smdistributed.modelparallel.torch.optimizers.fused_lamb import FusedLamb
from smdistributed.modelparallel.torch.optimizers.fused_novograd import FusedNovoGrad

FusedLAMB = FusedLamb

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
