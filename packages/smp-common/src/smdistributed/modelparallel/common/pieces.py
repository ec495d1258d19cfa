"""Where a tensor lives: which rectangle of the whole tensor a rank holds.

A model is one set of whole tensors, whatever the degrees of a job. On a rank, each of them is in
one of these states, and a parameter's gradient and the tensors of its optimizer state go with it:

- *whole*: all of it is here; so it is with one partition, and for what every rank needs.
- *foreign*: it belongs to another partition; here it is empty.
- *slice*: a part along one dim is here, and the tensor-parallel ranks have the others.
- *shard*: of what is here otherwise, a block of rows, and the ranks that share the state have the
  others.

All four are rectangles: offsets and sizes within the whole. A slice of a fused tensor, such as
query, key and value in one, is several of them, side by side (``Bands``). Ranks with the same part
are *copies*; the first of them speaks for the others where one suffices, as when a checkpoint is
written. Who broadcasts, reduces, norms, saves or loads asks a ``Piece`` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor that is an interval in each dim.

    Attributes:
        offsets: where it begins, by dim.
        sizes: how far it reaches, by dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Rectangle:
        """Returns all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """How many elements it has; one where there is no dim."""
        return math.prod(self.sizes)

    def cut(self, dim: int, num_parts: int, index: int) -> Rectangle:
        """Returns one of the parts that it is cut into along a dim; the first ones are larger.

        Args:
            dim: where it is cut.
            num_parts: into how many parts; a part is empty if there are more than elements.
            index: which part.

        Raises:
            ValueError: there is no such dim, or no such part.
        """
        if not 0 <= dim < len(self.sizes) or not 0 <= index < num_parts:
            raise ValueError(
                f"a rectangle of {len(self.sizes)} dims is cut along one of them, and has parts 0 "
                f"to {num_parts - 1}; received dim {dim} and part {index}."
            )
        least, larger = divmod(self.sizes[dim], num_parts)
        start = index * least + min(index, larger)
        size = least + (index < larger)
        return Rectangle(
            _with(self.offsets, dim, self.offsets[dim] + start), _with(self.sizes, dim, size)
        )

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """Returns what two parts of one tensor have in common; None if they have no element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Rectangle(
            starts, tuple(end - start for start, end in zip(starts, ends, strict=True))
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """Where it ends, by dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Returns the index of this part in a tensor that holds ``outer``."""
        return tuple(
            slice(offset - base, offset - base + size)
            for offset, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )

    def places(self) -> Iterator[tuple[Rectangle, Rectangle]]:
        """Yields itself, and where it lies in a tensor that holds it alone; see ``Bands``."""
        yield self, Rectangle.whole(self.sizes)

    def inner(self, block: Rectangle) -> Rectangle:
        """Returns which part of the whole a rectangle of what is held is."""
        offsets = tuple(map(sum, zip(self.offsets, block.offsets, strict=True)))
        return Rectangle(offsets, block.sizes)


@dataclass(frozen=True)
class Bands:
    """Rectangles of one tensor that are held as one: side by side along a dim.

    Attributes:
        rectangles: of the whole tensor, in the order in which they lie; they differ along ``dim``
            alone.
        dim: along which they lie side by side.
    """

    rectangles: tuple[Rectangle, ...]
    dim: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How far what is held reaches, by dim."""
        total = sum(each.sizes[self.dim] for each in self.rectangles)
        return _with(self.rectangles[0].sizes, self.dim, total)

    @property
    def num_elements(self) -> int:
        """How many elements are held."""
        return math.prod(self.sizes)

    def places(self) -> Iterator[tuple[Rectangle, Rectangle]]:
        """Yields each rectangle of the whole, and where it lies in what is held."""
        start = 0
        for each in self.rectangles:
            offsets = _with((0,) * len(each.sizes), self.dim, start)
            yield each, Rectangle(offsets, each.sizes)
            start += each.sizes[self.dim]

    def inner(self, block: Rectangle) -> Part:
        """Returns which part of the whole a rectangle of what is held is."""
        found = []
        for there, here in self.places():
            common = here.intersection(block)
            if common is not None:
                within = tuple(a - b for a, b in zip(common.offsets, here.offsets, strict=True))
                found.append(there.inner(Rectangle(within, common.sizes)))
        if not found:
            return Rectangle(self.rectangles[0].offsets, block.sizes)
        return found[0] if len(found) == 1 else Bands(tuple(found), self.dim)


#: What a rank holds of a tensor.
Part = Rectangle | Bands


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that some ranks hold.

    Attributes:
        name: of the tensor in the whole model.
        shape: of the whole tensor.
        part: which part of it.
        ranks: the global ranks that hold this very part, ascending.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    ranks: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of the tensor."""
        return self.part.sizes == self.shape

    @property
    def speaker(self) -> int:
        """The rank that speaks for all that hold it."""
        return self.ranks[0]


def covers(parts: Iterable[Part], wanted: Rectangle) -> bool:
    """Tells whether parts that do not overlap hold every element of ``wanted``."""
    common = (each.intersection(wanted) for part in parts for each, _ in part.places())
    return sum(each.num_elements for each in common if each is not None) == wanted.num_elements


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
