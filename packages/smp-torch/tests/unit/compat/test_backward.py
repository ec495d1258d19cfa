"""What PyTorch's backward passes are asked about."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.compat.private.backward import is_accumulation_kept


def test_a_graph_that_is_kept_keeps_what_adds_up_gradients() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not is_accumulation_kept(leaf)
    kept = (leaf * 2).sum()
    assert is_accumulation_kept(leaf)
    kept.backward()  # type: ignore[no-untyped-call]
    assert is_accumulation_kept(leaf)  # its nodes are, without what they computed with
    kept = kept.detach()
    assert not is_accumulation_kept(leaf)
    leaf.register_hook(lambda gradient: gradient)
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert not is_accumulation_kept(leaf)
