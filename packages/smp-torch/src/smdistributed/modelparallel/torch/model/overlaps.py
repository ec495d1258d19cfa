"""Parameters that have memory in common with another one, or with a buffer, and are not one object.

``a.weight.data = b.weight.data`` makes such: writes to one are seen in the other in one process,
and nowhere else. Parameters that are one object, ``a.weight = b.weight``, are no such.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

#: Above it parts of a memory that are interleaved are taken to overlap.
_MOST_COMPARED = 1 << 26


def overlaps_in(module: nn.Module) -> list[tuple[str, str]]:
    """Returns the names of what overlaps, in pairs of which one at least is a parameter."""
    by_memory: dict[int, list[tuple[str, torch.Tensor, bool]]] = {}
    for is_parameter, named in ((True, module.named_parameters()), (False, module.named_buffers())):
        for name, tensor in named:
            if _has_memory(tensor):
                memory = tensor.untyped_storage().data_ptr()
                if memory:
                    by_memory.setdefault(memory, []).append((name, tensor, is_parameter))
    return [pair for each in by_memory.values() if len(each) > 1 for pair in _pairs(each)]


def _pairs(named: list[tuple[str, torch.Tensor, bool]]) -> Iterator[tuple[str, str]]:
    for one, other in itertools.combinations(named, 2):
        if (one[2] or other[2]) and _overlap(one[1], other[1]):
            yield one[0], other[0]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (start, end), (begin, stop) = _extent(one), _extent(other)
    if end <= begin or stop <= start:
        return False
    same = one.is_contiguous() and other.is_contiguous()
    if same or one.itemsize != other.itemsize or max(end, stop) > _MOST_COMPARED:
        return True
    marks = torch.zeros(max(end, stop) // one.itemsize, dtype=torch.bool, device="cpu")
    places = [marks.as_strided(e.shape, e.stride(), e.storage_offset()) for e in (one, other)]
    places[0].fill_(True)
    return bool(places[1].any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns its first byte in its memory, and the one behind its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    start = tensor.storage_offset()
    last = start + sum((size - 1) * stride for size, stride in sizes)
    return int(start) * tensor.itemsize, int(last + 1) * tensor.itemsize


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory; of a lazy module it does from the first call on."""
    is_there = tensor.layout is torch.strided and not tensor.is_meta and not is_lazy(tensor)
    return is_there and bool(tensor.numel())
