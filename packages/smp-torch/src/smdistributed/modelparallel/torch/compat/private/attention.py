"""Kernels of attention that also give the log-sums of their rows, beyond PyTorch's public API.

The log-sum of a row (``logsumexp`` of its scores) says how much each of several sets of keys weighs
in it, so attention to all keys can be put together of attention to each set.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_OPERATIONS = torch.ops.aten
_CUDNN = int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)
_FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


class Attended(NamedTuple):
    """What attention gave.

    Attributes:
        result: ``(batch, heads, queries, channels)``.
        log_sums: ``(batch, heads, queries)``, in fp32 or wider.
        kept: what else its kernel wants back for the gradients.
    """

    result: torch.Tensor
    log_sums: torch.Tensor
    kept: tuple[torch.Tensor | int, ...]


def gives_log_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> bool:
    """Whether PyTorch would attend causally by a kernel that ``attend`` has.

    On GPUs that is cuDNN's: the flash kernel, where PyTorch prefers it, does not need it, since
    it also takes fewer queries than keys.
    """
    if query.dim() != 4 or key.dim() != 4 or query.shape[1] % key.shape[1]:
        return False
    is_grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(
        query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    return int(chosen) == (_FLASH if query.device.type == "cpu" else _CUDNN)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    *,
    is_causal: bool,
) -> Attended:
    """Returns attention to some keys. Shape: ``(batch, heads, length, channels)`` of all.

    Several heads of the query may share one of key and value.
    """
    if query.device.type == "cpu":
        result, log_sums = _OPERATIONS._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return Attended(result, log_sums, ())
    result, log_sums, *kept = _OPERATIONS._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return Attended(result, log_sums.view(result.shape[:-1]), tuple(kept[:-1]))


def gradients_of(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: Attended,
    scale: float | None,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value.

    Args:
        gradient: of the result of attention to all keys.
        query: as it was given to ``attend``.
        key: likewise.
        value: likewise.
        attended: of these keys, with result and log-sums of all.
        scale: likewise.
        is_causal: likewise.
    """
    result, log_sums, kept = attended
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if query.device.type == "cpu":
        found = _OPERATIONS._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, result, log_sums, 0.0, is_causal, scale=scale
        )
        return found
    ends_of_queries, ends_of_keys, longest_query, longest_key, seed, offset = kept
    found = _OPERATIONS._scaled_dot_product_cudnn_attention_backward(
        *(gradient, query, key, value, result, log_sums.unsqueeze(-1), seed, offset, None),
        *(ends_of_queries, ends_of_keys, longest_query, longest_key, 0.0, is_causal),
        scale=scale,
    )
    return found
