"""``smp.nn.FusedLayerNorm``: layer normalisation by torch's own fused kernel.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalisation with the arguments of apex's class, by torch's fused kernel.

    A class of its own: scripts choose parameters without weight decay by it. Needs no apex.

    Shape: ``(..., *normalized_shape)`` to the same.

    Args:
        normalized_shape: the last dims, over which to normalise.
        eps: added to the variance.
        elementwise_affine: have a weight and a bias.

    Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine)
