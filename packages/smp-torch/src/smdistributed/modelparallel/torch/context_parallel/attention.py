"""Attention of the own queries to the keys of the whole sequence.

Keys and values of all ranks are gathered; queries stay where they are. So any mask is exact, each
kernel of PyTorch can be used, and a rank sends what it has of keys and values once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from smdistributed.modelparallel.torch.context_parallel.calls import Form
from smdistributed.modelparallel.torch.context_parallel.causal import causal
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import BLOCKS, Layout, cut

SDPA = torch.nn.functional.scaled_dot_product_attention


def attention(
    group: ContextGroup,
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
    key, value = _whole(group, key), _whole(group, value)
    if is_causal and attn_mask is None:
        size = query.shape[-2] // BLOCKS
        places = group.rank, BLOCKS * group.size - 1 - group.rank
        ends = [(place + 1) * size for place in places]
        return causal(query, key, value, ends, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.shape[-2] == query.shape[-2] * group.size:
        attn_mask = cut(attn_mask, Layout(attn_mask.dim() - 2), group.rank, group.size)
    return SDPA(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _whole(group: ContextGroup, piece: torch.Tensor) -> torch.Tensor:
    """Returns keys or values of the whole sequence. Collective: CP_GROUP.

    Heads are made of the channels of a token, so in memory they mostly lie inside of the sequence:
    in this order they go over without a copy.
    """
    if piece.dim() < 3:
        return group.whole(piece, Layout(piece.dim() - 2))
    by_tokens = piece.transpose(-3, -2)
    return group.whole(by_tokens, Layout(piece.dim() - 3)).transpose(-3, -2)


def misfit(forms: Mapping[str, Form], options: Mapping[str, Any]) -> str | None:
    """Returns why a call cannot be made for pieces.

    Args:
        forms: of its tensors, by the names of the arguments.
        options: the other arguments.
    """
    sizes = {}
    fitting: list[Layout | None]
    for name in ("query", "key", "value"):
        form = forms[name]
        fitting = [Layout(len(form.whole) - 2)]
        if name == "query" and not options.get("is_causal"):
            fitting.append(None)  # every rank has all queries, and reads all keys
        if form.layout not in fitting:
            return f"its {name} is not cut along the sequence, dim {len(form.whole) - 2}, alone"
        sizes[name] = form.whole[-2]
    if options.get("dropout_p"):
        return "its dropout_p is not 0, and each rank would draw numbers for its own queries"
    if options.get("is_causal") and sizes["query"] != sizes["key"]:
        return "it is causal, and queries and keys are of sequences of different lengths"
    mask = forms.get("attn_mask")
    if mask is None:
        return None
    keys = sizes["key"]
    is_fit = mask.own[-1] in (1, keys) and mask.layout in (None, Layout(len(mask.whole) - 2))
    if is_fit and (mask.layout is not None or mask.own[-2] in (1, sizes["query"])):
        return None
    return (
        f"its attn_mask has the shape {tuple(mask.own)}, without a column for each of the {keys} "
        "keys of the whole sequence: pass is_causal=True, or a mask that is an argument of the "
        "step function, or made of such arguments or of numbers alone"
    )
