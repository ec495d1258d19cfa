"""``smp.nn.FlashAttentionLayer``: attention from a packed tensor, by torch's fused kernels.

Source: smd_model_parallel_pytorch.rst, FlashAttentionLayer.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.nn.scores import scale_of

logger = logging.getLogger(__name__)


class FlashAttentionLayer(nn.Module):
    """Attention of one rank, computed by the fused kernel that torch chooses for device and type.

    Shape: ``(batch, seq, 3, heads, head_size)`` to ``(batch, heads, seq, head_size)``.

    Args:
        attention_dropout_prob: of probabilities.
        attention_head_size: channels of a head; needed with ``scale_attention_scores``.
        scale_attention_scores: divide scores by the square root of the head size.
        scale_attn_by_layer_idx: divide them by the number of the layer, counted from 1, too.
        layer_idx: the number of the layer, counted from 0.
        scale: the factor of the scores; then the four arguments above have no effect.
        triton_flash_attention: no dropout; allows ``use_alibi``.
        use_alibi: ``forward`` takes a mask.

    Raises:
        ValueError: an argument that another one needs is missing.

    Source: smd_model_parallel_pytorch.rst, FlashAttentionLayer.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if scale is None:
            for name, is_set, needed, value in (
                (
                    "scale_attention_scores",
                    scale_attention_scores,
                    "attention_head_size",
                    attention_head_size,
                ),
                ("scale_attn_by_layer_idx", scale_attn_by_layer_idx, "layer_idx", layer_idx),
            ):
                if is_set and value is None:
                    raise ValueError(
                        f"{name}=True needs {needed}; received None: pass it, or {name}=False."
                    )
            scale = scale_of(
                attention_head_size, scale_attention_scores, layer_idx, scale_attn_by_layer_idx
            )
        if use_alibi and not triton_flash_attention:
            raise ValueError(
                "use_alibi=True needs triton_flash_attention=True; received False: pass both."
            )
        self.scale = scale
        self.attention_dropout_prob = attention_dropout_prob
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi
        self._has_warned = False

    def forward(
        self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        """Attends.

        Args:
            qkv: queries, keys and values along dim 2.
            attn_mask: added to the scores; broadcasts to ``(batch, heads, seq, seq)``.
            causal: a query sees no later key.

        Raises:
            ValueError: a mask without ``triton_flash_attention`` and ``use_alibi``, or ``qkv`` of
                another shape.
        """
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                "qkv must have the shape (batch, seq, 3, heads, head_size); received "
                f"{tuple(qkv.shape)}."
            )
        if attn_mask is not None and not self.use_alibi:
            raise ValueError(
                "attn_mask needs triton_flash_attention=True and use_alibi=True: make the layer "
                "with both, or leave the mask out."
            )
        share = self.attention_dropout_prob if self.training else 0.0
        if share and self.triton_flash_attention:
            if not self._has_warned:
                logger.warning(
                    "triton_flash_attention knows no dropout: attention_dropout_prob %s has no "
                    "effect.",
                    share,
                )
                self._has_warned = True
            share = 0.0
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        if attn_mask is None:
            return F.scaled_dot_product_attention(
                queries, keys, values, None, share, causal, scale=self.scale
            )
        bias = attn_mask.to(queries.dtype)
        if causal:
            length = queries.shape[-2]
            later = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
            bias = bias.expand(*bias.shape[:-2], length, length)
            bias = bias.masked_fill(later, torch.finfo(bias.dtype).min)
        return F.scaled_dot_product_attention(queries, keys, values, bias, share, scale=self.scale)
