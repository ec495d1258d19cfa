"""Attention of the own queries to the keys of the whole sequence.

Keys and values of all ranks are gathered; queries stay where they are. So any mask is exact, each
kernel of PyTorch can be used, and a rank sends what it has of keys and values once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.context_parallel.calls import Form
from smdistributed.modelparallel.torch.context_parallel.causal import causal
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, cut

SDPA = torch.nn.functional.scaled_dot_product_attention


class Places(NamedTuple):
    """Where the tokens of queries and keys are.

    Attributes:
        num_queries: of the whole sequence.
        queries: how they are cut; None if every rank has all.
        num_keys: of the whole sequence.
        keys: how they are cut, and values.
    """

    num_queries: int
    queries: Layout | None
    num_keys: int
    keys: Layout


def attention(
    group: ContextGroup,
    places: Places,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Does for pieces what ``scaled_dot_product_attention`` does. Collective: CP_GROUP.

    Shape: ``(..., heads, own part of the sequence, channels)``, also of the result; the query may
    have all of its sequence. The mask has all keys, and all queries or the own ones.
    """
    key, value = _whole(group, key, places), _whole(group, value, places)
    queries = places.queries
    if is_causal and attn_mask is None and queries is not None:
        spans = queries.spans(places.num_queries, group.rank, group.size)
        return causal(query, key, value, spans, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and queries is not None and attn_mask.shape[-2] == places.num_queries:
        mask = Layout(attn_mask.dim() - 2, 1, queries.window)
        attn_mask = cut(attn_mask, mask, group.rank, group.size)
    return SDPA(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _whole(group: ContextGroup, piece: torch.Tensor, places: Places) -> torch.Tensor:
    """Returns keys or values of the whole sequence. Collective: CP_GROUP.

    Heads are made of the channels of a token, so in memory they mostly lie inside of the sequence:
    in this order they go over without a copy.
    """
    window = places.keys.window
    if piece.dim() < 3:
        return group.whole(piece, places.num_keys, Layout(piece.dim() - 2, 1, window))
    by_tokens = piece.transpose(-3, -2)
    layout = Layout(piece.dim() - 3, 1, window)
    return group.whole(by_tokens, places.num_keys, layout).transpose(-3, -2)


def is_along(layout: Layout | None, dim: int) -> bool:
    """Whether a tensor is cut along a dim that has one sequence."""
    return layout is not None and (layout.dim, layout.outer) == (dim, 1)


def misfit(forms: Mapping[str, Form], options: Mapping[str, Any]) -> str | None:
    """Returns why a call cannot be made for pieces.

    Args:
        forms: of its tensors, by the names of the arguments.
        options: the other arguments.
    """
    sizes = {}
    for name in ("query", "key", "value"):
        form = forms[name]
        dim = len(form.whole) - 2
        # Where every rank has all queries, each reads all keys.
        is_whole = name == "query" and form.layout is None and not options.get("is_causal")
        if not is_along(form.layout, dim) and not is_whole:
            return f"its {name} is not cut along the sequence, dim {dim}, alone"
        sizes[name] = form.whole[-2]
    query, key, value = (forms[name].layout for name in ("query", "key", "value"))
    if key is None or value is None or key.window != value.window:
        return "its key and its value are of other tokens of the sequence"
    if options.get("dropout_p"):
        return "its dropout_p is not 0, and each rank would draw numbers for its own queries"
    if options.get("is_causal") and sizes["query"] != sizes["key"]:
        return "it is causal, and queries and keys are of sequences of different lengths"
    mask = forms.get("attn_mask")
    if mask is None:
        return None
    keys = sizes["key"]
    is_piece = is_along(mask.layout, len(mask.whole) - 2)
    if is_piece:
        is_fit = query is not None and mask.layout.window == query.window  # type: ignore[union-attr]
    else:
        is_fit = mask.layout is None and mask.own[-2] in (1, sizes["query"])
    if is_fit and mask.own[-1] in (1, keys):
        return None
    return (
        f"its attn_mask has the shape {tuple(mask.own)}, without a column for each of the {keys} "
        "keys of the whole sequence: pass is_causal=True, or a mask that is an argument of the "
        "step function, or made of such arguments or of numbers alone"
    )
