"""How a tensor looks at a moment of a run on fakes.

A fake stands for all versions of a tensor that is written to in place, in all microbatches. What it
shows at present is true of one of them at most: what is said of a tensor at a moment comes from the
looks that were taken at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Looks:
    """What code can see of a fake, and an operation in place may change."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Looks:
        """Returns the looks of a tensor."""
        # What has no strides lies in the order of its dims.
        strided = tensor.layout is torch.strided
        stride = tensor.stride() if strided else range(tensor.dim(), 0, -1)
        return Looks(tuple(tensor.shape), tuple(stride), tensor.requires_grad)

    def give(self, tensor: torch.Tensor, *, forgets: bool = True) -> None:
        """Makes a fake look so again.

        Args:
            tensor: the fake.
            forgets: that it requires a gradient may be taken back.
        """
        if tensor.requires_grad and not self.requires_grad and forgets:
            tensor.detach_() if tensor.grad_fn is not None else tensor.requires_grad_(False)
        if (tuple(tensor.shape), tuple(tensor.stride())) != (self.shape, self.stride):
            with torch.no_grad():
                tensor.as_strided_(self.shape, self.stride)
        if self.requires_grad and not tensor.requires_grad:
            one = torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
            with torch.enable_grad():
                tensor.mul_(one)  # not as a leaf, to which nobody might write
