"""Gradients of many parameters in few flat tensors, so that reducing them takes few messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.distributed import (
    GradBucket,
    gradient_buckets,
)


class Bucket:
    """A flat tensor that holds the gradients of some parameters for their reduction.

    Attributes:
        handle: torch's view of it, which communication hooks take.
        flat: the tensor itself.
        slots: each parameter with its place in ``flat``, in the parameter's shape.
    """

    def __init__(self, handle: GradBucket) -> None:
        self.handle = handle
        self.flat = handle.buffer()
        parameters = handle.parameters()
        views = handle.gradients()
        if any(parameter.is_complex() for parameter in parameters):
            # Such a bucket has no others. Torch holds it in real numbers, and so gives the views.
            sizes = [parameter.numel() for parameter in parameters]
            pieces = torch.view_as_complex(self.flat.view(-1, 2)).split(sizes)  # type: ignore[no-untyped-call]
            views = [
                piece.view_as(parameter)
                for piece, parameter in zip(pieces, parameters, strict=True)
            ]
        # Kept, so that a gradient that is such a view can be told by identity.
        self.slots: list[tuple[torch.Tensor, torch.Tensor]] = list(
            zip(parameters, views, strict=True)
        )

    def take_result(self, future: torch.futures.Future[object]) -> None:
        """Waits for a reduction and brings its result into ``flat``."""
        future.wait()
        result = future.value()
        tensor = result[0] if isinstance(result, list | tuple) else result
        assert isinstance(tensor, torch.Tensor)
        if tensor.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(tensor.view_as(self.flat))
        self.handle.set_buffer(self.flat)


def make_buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Distributes parameters over buckets, the last parameters first, as their gradients come.

    The same on every rank that passes parameters of the same sizes and types.

    Args:
        parameters: those to reduce.
        cap_bytes: size of a bucket; the first is smaller, so that communication begins early.
    """
    if not parameters:
        return []
    return [Bucket(handle) for handle in gradient_buckets(parameters, cap_bytes)]
