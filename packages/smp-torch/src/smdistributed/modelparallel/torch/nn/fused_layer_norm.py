"""``smp.nn.FusedLayerNorm``.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from __future__ import annotations

from torch import nn


class FusedLayerNorm(nn.LayerNorm):
    """torch's layer norm, which has a fused kernel, under the name of apex's.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """
