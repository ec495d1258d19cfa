"""The arithmetic of attention: scores, masks, positions, probabilities.

Shape: queries ``(N, heads, S, d)``, keys and values ``(N, heads, K, d)``; heads are those of this
rank.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Appendix: Reference Implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

#: (probabilities) -> those that are kept, scaled
Drop = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees, and how much of them.

    Attributes:
        is_causal: those up to its own position.
        window: at most so many of these; None for all.
        mask: added to the scores, shaped so that it broadcasts to them; None adds nothing.
        alibi: a bias by head and key, ``(1, heads, 1, K)``; None adds nothing.
    """

    is_causal: bool = False
    window: int | None = None
    mask: torch.Tensor | None = None
    alibi: torch.Tensor | None = None

    @property
    def is_plainly_causal(self) -> bool:
        """Whether kernels that know causal attention need nothing else."""
        return self.is_causal and self.window is None and self.mask is None and self.alibi is None

    def hidden(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """Returns which keys are hidden by their position, ``(S, K)``."""
        if not self.is_causal:
            return None
        query = torch.arange(num_queries, device=device)[:, None]
        key = torch.arange(num_keys, device=device)[None]
        hidden = key > query
        return hidden if self.window is None else hidden | (query - key >= self.window)

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores with all masks; a query that sees no key sees all of them alike."""
        lowest = torch.finfo(scores.dtype).min
        hidden = self.hidden(scores.shape[-2], scores.shape[-1], scores.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, lowest)
        for bias in (self.alibi, self.mask):
            if bias is not None:
                scores = scores + bias.to(scores.dtype)
        return scores.clamp(min=lowest) if self.mask is not None else scores

    def bias(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Returns all masks as one that is added to the scores."""
        if not self.is_causal and self.mask is None and self.alibi is None:
            return None
        shape = (1, 1, queries.shape[-2], keys.shape[-2])
        return self.apply(queries.new_zeros(shape))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: Visible,
    *,
    scale: float,
    drop: Drop | None,
    fused_dropout: float = 0.0,
    in_fp32: bool = False,
    late_scale: float = 1.0,
) -> torch.Tensor:
    """Returns the values, weighted by the attention of each query.

    Args:
        queries, keys, values: by head.
        visible: which keys a query sees.
        scale: the factor of the scores.
        drop: of probabilities; None drops none, and lets torch choose a fused kernel.
        fused_dropout: the share that such a kernel drops.
        in_fp32: scores and probabilities are in single precision.
        late_scale: a part of ``scale`` that is multiplied in single precision only.
    """
    upcasts = in_fp32 and queries.dtype != torch.float32
    if drop is None and not upcasts:
        if visible.is_plainly_causal and queries.shape[-2] == keys.shape[-2]:
            bias, is_causal = None, True
        else:
            bias, is_causal = visible.bias(queries, keys), False
        return F.scaled_dot_product_attention(
            queries, keys, values, bias, fused_dropout, is_causal, scale=scale
        )
    if in_fp32:
        queries, keys = queries.float(), keys.float()
    scores = (queries * (scale / late_scale)) @ keys.transpose(-1, -2)
    if late_scale != 1.0:
        scores = scores.float() * late_scale
    probabilities = visible.apply(scores).softmax(-1).to(values.dtype)
    if drop is not None:
        probabilities = drop(probabilities)
    return probabilities @ values


def alibi_bias(
    num_keys: int,
    num_heads: int,
    first: int,
    count: int,
    bias_max: float,
    like: torch.Tensor,
) -> torch.Tensor:
    """Returns the bias of some heads, ``(1, count, 1, num_keys)``.

    Args:
        num_keys: how many keys there are.
        num_heads: of all ranks.
        first: the first head of this rank.
        count: how many it has.
        bias_max: the base of the slopes.
        like: gives type and device.
    """
    heads = torch.arange(first, first + count, device=like.device, dtype=torch.float32)
    slopes = 2.0 ** (-(heads + 1) * bias_max / num_heads)
    distance = torch.arange(num_keys, device=like.device, dtype=torch.float32) - (num_keys - 1)
    return (slopes[:, None, None] * distance)[None].to(like.dtype)


def rotated(
    tensor: torch.Tensor, rotary_dim: int, base: float, *, interleaved: bool
) -> torch.Tensor:
    """Returns queries or keys with channels rotated by their positions, 0 and up."""
    half = rotary_dim // 2
    device = tensor.device
    exponents = torch.arange(half, device=device, dtype=torch.float32) * 2 / rotary_dim
    positions = torch.arange(tensor.shape[-2], device=device, dtype=torch.float32)
    angles = positions[:, None] * torch.pow(torch.tensor(float(base), device=device), -exponents)
    cos, sin = angles.cos().to(tensor.dtype), angles.sin().to(tensor.dtype)
    turned, rest = tensor[..., :rotary_dim], tensor[..., rotary_dim:]
    if interleaved:
        one, other = turned[..., 0::2], turned[..., 1::2]
    else:
        one, other = turned[..., :half], turned[..., half:]
    pairs = (one * cos - other * sin, other * cos + one * sin)
    joined = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([joined, rest], dim=-1)


def scale_of(head_size: int | None, scales: bool, layer_idx: int | None, by_layer: bool) -> float:
    """Returns the factor of scores: of the size of a head, of the number of the layer, or both."""
    scale = 1.0
    if scales:
        assert head_size is not None
        scale /= math.sqrt(head_size)
    if by_layer:
        assert layer_idx is not None
        scale /= layer_idx + 1
    return scale
