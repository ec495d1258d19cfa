"""Pieces of sequences, and what they cost under a causal mask."""

from __future__ import annotations

import pytest
import torch

from smdistributed.modelparallel.torch.context_parallel.layout import (
    Layout,
    Window,
    all_cut,
    cut,
    joined,
    sequence_of,
    shares_of,
)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", [Layout(1), Layout(0, 5), Layout(2, 2)])
def test_pieces_are_the_whole(layout: Layout, num_ranks: int) -> None:
    shape = [2, 3, 4]
    shape[layout.dim] = layout.outer * 2 * num_ranks * 3
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = [cut(whole, layout, rank, num_ranks) for rank in range(num_ranks)]
    assert {each.shape[layout.dim] for each in pieces} == {shape[layout.dim] // num_ranks}
    assert torch.equal(joined(pieces, layout), whole)
    assert torch.equal(
        all_cut(whole, layout, num_ranks), torch.cat([each.flatten() for each in pieces])
    )


def test_flattened_sequences_are_cut_each() -> None:
    whole = torch.arange(3 * 8).view(3, 8)
    for rank in range(2):
        flat = cut(whole.flatten(), Layout(0, 3), rank, 2)
        assert torch.equal(flat, cut(whole, Layout(1), rank, 2).flatten())


def test_causal_attention_is_the_same_work_for_each() -> None:
    places = torch.arange(24)
    work = {int((cut(places, Layout(0), rank, 3) // 4 + 1).sum()) for rank in range(3)}
    assert len(work) == 1


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("start", "stop"), [(0, 23), (1, 24), (-3, 24), (0, 26), (12, 24), (5, 7)])
@pytest.mark.parametrize("inner", [1, 3])
def test_windows(num_ranks: int, start: int, stop: int, inner: int) -> None:
    """Each token of a window is where it is in the sequence."""
    sequence = torch.arange(-3, 26)
    owners = [
        set(cut(sequence[3:27], Layout(0), at, num_ranks).tolist()) for at in range(num_ranks)
    ]
    owners[0] |= {-3, -2, -1, 24, 25}
    window = Window(24, start, stop)
    whole = sequence[start + 3 : stop + 3].repeat(2, 1).repeat_interleave(inner, 1).flatten()
    layout = Layout(0, 2, window)
    pieces = [cut(whole, layout, rank, num_ranks) for rank in range(num_ranks)]
    for rank, piece in enumerate(pieces):
        assert set(piece.tolist()) <= owners[rank]
        assert len(piece) == layout.size_of(len(whole), rank, num_ranks)
    assert torch.equal(joined(pieces, layout), whole)
    assert torch.equal(all_cut(whole, layout, num_ranks), torch.cat(pieces))
    shares = shares_of([whole.shape], [layout], num_ranks)
    assert shares is not None
    assert sum(shares) == pytest.approx(1)


def test_sequences_of_any_length_have_pieces() -> None:
    assert sequence_of(1, 16, 2) == Layout(1)
    for num_ranks in (2, 3, 4):
        for length in range(2 * num_ranks, 40):
            layout = sequence_of(0, length, num_ranks)
            sizes = [layout.size_of(length, rank, num_ranks) for rank in range(num_ranks)]
            assert min(sizes) > 0
            assert sum(sizes) == length
