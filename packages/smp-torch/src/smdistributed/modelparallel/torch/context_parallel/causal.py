"""Causal attention of blocks of queries, each of which reads all keys up to its own end.

A block reads all keys before it, and of its own those up to each query. Kernels know two masks that
need no memory: none, and the lower triangle of a square. A block's is a rectangle beside a
triangle: with the flash kernel it is one call (``causal_lower_right``), where cuDNN's, which is
faster by half on Hopper, needs two. Each gives the log-sums of its rows, by which they are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right

from smdistributed.modelparallel.torch.compat.private.attention import (
    Attended,
    attend,
    gives_log_sums,
    gradients_of,
)


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Returns attention of blocks of queries.

    Shape: ``(..., heads, length, channels)``, also of the result.

    Args:
        query: blocks, one after the other.
        key: of the whole sequence.
        value: likewise.
        spans: where each block begins and ends in the sequence; some may be empty.
        scale: of the scores; None for one over the root of the channels.
        enable_gqa: several heads of the query share one of key and value.
    """
    query, key, value = _as_autocast(query), _as_autocast(key), _as_autocast(value)
    spans = tuple(each for each in spans if each[0] < each[1])
    if not spans:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=enable_gqa
        )
    if (enable_gqa or query.shape[-3] == key.shape[-3]) and gives_log_sums(
        query, key, value, scale
    ):
        merged: torch.Tensor = _Merged.apply(query, key, value, spans, scale)  # type: ignore[no-untyped-call]
        return merged
    results = []
    sizes = [end - start for start, end in spans]
    for block, (start, end) in zip(torch.split(query, sizes, -2), spans, strict=True):
        mask: Any = causal_lower_right(end - start, end)
        result = torch.nn.functional.scaled_dot_product_attention(
            *(block, key[..., :end, :], value[..., :end, :], mask),
            scale=scale,
            enable_gqa=enable_gqa,
        )
        results.append(result)
    return torch.cat(results, -2)


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as autocast gives it to attention."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _Part(NamedTuple):
    """Queries and keys that one call of a kernel attends.

    Attributes:
        queries: of a block.
        keys: before the block, or its own.
        is_causal: whether these are its own.
    """

    queries: slice
    keys: slice
    is_causal: bool

    def of(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the parts of tensors of all queries and keys."""
        return query[..., self.queries, :], key[..., self.keys, :], value[..., self.keys, :]


def _parts(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[_Part, ...]]:
    """Yields the parts of each block."""
    first = 0
    for start, end in spans:
        queries = slice(first, first + end - start)
        first = queries.stop
        own = _Part(queries, slice(start, end), True)
        yield (_Part(queries, slice(0, start), False), own) if start else (own,)


class _Merged(torch.autograd.Function):
    """Attention of blocks, of which each part is a call of a kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        scale: float | None,
    ) -> torch.Tensor:
        blocks, kept = [], []
        for parts in _parts(spans):
            found = [
                attend(*part.of(query, key, value), scale, is_causal=part.is_causal)
                for part in parts
            ]
            kept.append([each.kept for each in found])
            blocks.append(_merged(found))
        result = torch.cat([block for block, _ in blocks], -2)
        ctx.save_for_backward(query, key, value, result, *(log_sums for _, log_sums in blocks))
        ctx.spans, ctx.scale, ctx.kept = spans, scale, kept
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, *log_sums = ctx.saved_tensors
        sums = [torch.zeros_like(each) for each in (query, key, value)]
        for number, parts in enumerate(_parts(ctx.spans)):
            for part, kept in zip(parts, ctx.kept[number], strict=True):
                found = gradients_of(
                    gradient[..., part.queries, :],
                    *part.of(query, key, value),
                    Attended(result[..., part.queries, :], log_sums[number], kept),
                    ctx.scale,
                    is_causal=part.is_causal,
                )
                for total, each in zip(part.of(*sums), found, strict=True):
                    total += each
        return *sums, None, None


def _merged(found: Sequence[Attended]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention to the keys of all parts, and its log-sums."""
    result, log_sums = found[0].result, found[0].log_sums
    for each in found[1:]:
        total = torch.logaddexp(log_sums, each.log_sums)
        share = torch.exp(each.log_sums - total).unsqueeze(-1)
        result = torch.lerp(result.to(share.dtype), each.result.to(share.dtype), share)
        log_sums = total
    return result.to(found[0].result.dtype), log_sums
