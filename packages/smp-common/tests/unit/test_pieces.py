"""Rectangles of tensors: every small layout is cut, and read back into every other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from smdistributed.modelparallel.common.pieces import Bands, Piece, Rectangle, covers

SHAPES = [(), (1,), (7,), (4, 6), (5, 3, 2), (0, 3)]
#: (slices along the last dim, blocks of rows of what is left)
LAYOUTS = list(itertools.product((1, 2, 3), (1, 2, 4)))


def cut(shape: tuple[int, ...], layout: tuple[int, int]) -> list[Rectangle]:
    whole = Rectangle.whole(shape)
    if not shape:
        return [whole]
    slices, blocks = layout
    return [
        whole.cut(len(shape) - 1, slices, s).cut(0, blocks, b)
        for s in range(slices)
        for b in range(blocks)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_hold_every_element_once(shape: tuple[int, ...], layout: tuple[int, int]) -> None:
    counts = np.zeros(shape, int)
    whole = Rectangle.whole(shape)
    for part in cut(shape, layout):
        counts[part.within(whole)] += 1
        assert counts[part.within(whole)].size == part.num_elements
    assert (counts == 1).all()
    assert covers(cut(shape, layout), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_is_read_from_every_other(shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    whole = Rectangle.whole(shape)
    for source, target in itertools.product(LAYOUTS, LAYOUTS):
        stored = [(part, values[part.within(whole)]) for part in cut(shape, source)]
        for wanted in cut(shape, target):
            found = np.full(wanted.sizes, -1)
            for part, held in stored:
                common = part.intersection(wanted)
                if common is not None:
                    found[common.within(wanted)] = held[common.within(part)]
            assert (found == values[wanted.within(whole)]).all()


def test_parts_are_even_up_to_one_and_the_first_are_larger() -> None:
    whole = Rectangle.whole((7, 2))
    assert [whole.cut(0, 3, index).sizes[0] for index in range(3)] == [3, 2, 2]
    assert [whole.cut(0, 3, index).offsets[0] for index in range(3)] == [0, 3, 5]
    assert [whole.cut(1, 3, index).sizes[1] for index in range(3)] == [1, 1, 0]


def test_a_cut_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="received dim 2 and part 0"):
        Rectangle.whole((2, 2)).cut(2, 1, 0)
    with pytest.raises(ValueError, match="received dim 0 and part 3"):
        Rectangle.whole((2, 2)).cut(0, 3, 3)


def test_missing_elements_are_noticed() -> None:
    whole = Rectangle.whole((4, 4))
    halves = [whole.cut(0, 2, index) for index in range(2)]
    assert covers(halves, whole)
    assert not covers(halves[:1], whole)
    assert covers(halves[:1], halves[0].cut(1, 3, 2))


def test_the_first_of_the_copies_speaks() -> None:
    piece = Piece("a", (4, 2), Rectangle.whole((4, 2)).cut(0, 2, 1), (1, 3))
    assert piece.speaker == 1
    assert not piece.is_whole
    assert Piece("a", (4, 2), Rectangle.whole((4, 2)), (0,)).is_whole


def test_bands_and_their_blocks_hold_every_element_once() -> None:
    values = np.arange(12 * 6).reshape(12, 6)
    whole = Rectangle.whole(values.shape)
    for dim, lengths in ((0, (4, 4, 4)), (0, (8, 2, 2)), (1, (4, 2))):
        starts = np.cumsum((0, *lengths))[:-1].tolist()
        counts = np.zeros(values.shape, int)
        parts = []
        for rank in range(2):
            sections = [
                Rectangle(
                    *zip(
                        *((start, size) if d == dim else (0, values.shape[d]) for d in (0, 1)),
                        strict=True,
                    )
                ).cut(dim, 2, rank)
                for start, size in zip(starts, lengths, strict=True)
            ]
            held = Bands(tuple(sections), dim)
            here = np.concatenate([values[each.within(whole)] for each in sections], dim)
            assert held.sizes == here.shape
            assert held.num_elements == here.size
            for blocks in (1, 2, 5, 20):
                for block in range(blocks):
                    rows = Rectangle.whole(held.sizes).cut(0, blocks, block)
                    part = held.inner(rows)
                    found = np.full(part.sizes, -1)
                    for there, place in part.places():
                        found[place.within(Rectangle.whole(part.sizes))] = values[
                            there.within(whole)
                        ]
                        counts[there.within(whole)] += blocks == 5
                    assert (found == here[rows.within(Rectangle.whole(held.sizes))]).all()
            parts.append(held)
        assert (counts == 1).all()
        assert covers(parts, whole)
        assert not covers(parts[:1], whole)
