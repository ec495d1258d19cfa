"""The numbers in tensors: whether a run has changed them, by whatever way, and putting them back.

Versions and the dispatcher know what operations of torch write. What goes by NumPy, DLPack or a
pointer they do not, so a run that must leave no trace compares the numbers themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of, version_of
from smdistributed.modelparallel.torch.tensors.writes import note_writes


@contextlib.contextmanager
def contents_kept(tensors: Iterable[torch.Tensor], doing: str) -> Iterator[None]:
    """Puts back what is written to tensors inside; it counts as written.

    Args:
        tensors: to look after.
        doing: what somebody does, for messages; ``{}`` stands for the layout of a tensor.

    Raises:
        UnsupportedError: one was written to that is not strided, which nothing puts back.
    """
    others, kept = [], []
    for tensor in tensors:
        if tensor.layout is torch.strided:
            # Detached: if it is given another memory, or shape, this still shows the former.
            kept.append((tensor, tensor.detach(), copy_of(tensor)))
        else:
            others.append((tensor, version_of(tensor)))
    try:
        yield
    finally:
        for tensor, former, copy in kept:
            if not is_equal(former, copy):
                former.copy_(copy)
                note_writes([former])
            if storage_of(tensor) != storage_of(former) or tensor.shape != former.shape:
                tensor.data = former
                note_writes([tensor])
    for tensor, version in others:
        if version_of(tensor) != version:
            raise UnsupportedError(
                f"{doing.format(tensor.layout)}, and that cannot be put back. Write to a strided "
                "tensor, or give the module a new one."
            )


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the numbers."""
    return tensor.detach().clone()


def is_equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether the numbers are the same; what is no number is so everywhere."""
    tensor = tensor.detach()
    if tensor.is_meta or torch.equal(tensor, copy):  # on no device there are none
        return True
    may_be_nan = tensor.is_floating_point() or tensor.is_complex()
    if not may_be_nan or tensor.shape != copy.shape:
        return False
    return torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True)
