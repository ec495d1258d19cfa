"""Pieces of sequences, and what they cost under a causal mask."""

from __future__ import annotations

import pytest
import torch

from smdistributed.modelparallel.torch.context_parallel.layout import Layout, all_cut, cut, joined


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", [Layout(1), Layout(0, 5), Layout(2, 2)])
def test_pieces_are_the_whole(layout: Layout, num_ranks: int) -> None:
    shape = [2, 3, 4]
    shape[layout.dim] = layout.outer * 2 * num_ranks * 3
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = [cut(whole, layout, rank, num_ranks) for rank in range(num_ranks)]
    assert {each.shape[layout.dim] for each in pieces} == {shape[layout.dim] // num_ranks}
    assert torch.equal(joined(pieces, layout), whole)
    assert torch.equal(all_cut(whole, layout, num_ranks), torch.stack(pieces))


def test_flattened_sequences_are_cut_each() -> None:
    whole = torch.arange(3 * 8).view(3, 8)
    for rank in range(2):
        flat = cut(whole.flatten(), Layout(0, 3), rank, 2)
        assert torch.equal(flat, cut(whole, Layout(1), rank, 2).flatten())


def test_causal_attention_is_the_same_work_for_each() -> None:
    places = torch.arange(24)
    work = {int((cut(places, Layout(0), rank, 3) // 4 + 1).sum()) for rank in range(3)}
    assert len(work) == 1
