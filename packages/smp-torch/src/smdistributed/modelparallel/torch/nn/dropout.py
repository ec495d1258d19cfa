"""Dropout where one rank has a part: heads of all examples, or some of the own examples."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


class AttentionDropout(DistributedModule):
    """Drops what one rank alone would drop.

    Inside a step the mask of all heads is drawn for the examples of each rank, from the random
    numbers of that rank's examples, and cut to the own heads. Outside of one each rank draws for
    its own heads, from the user's generator.

    Args:
        probability: of each element.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.p = probability

    @property
    def is_active(self) -> bool:
        """Whether it drops anything now."""
        return self.training and self.p > 0

    def forward(self, probabilities: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Drops elements.

        Shape: ``(sum(sizes), heads / tp_size, S, K)``.
        """
        group = self.tensor_group
        random = group.random
        if group.size == 1 or random is None or not random.is_active:
            return F.dropout(probabilities, self.p, self.training)
        if group.is_prescaled:
            return probabilities * self._mask(probabilities)
        parts = torch.split(probabilities, list(sizes))
        masks: list[torch.Tensor] = []
        for lane, part in enumerate(parts):
            is_own = lane == group.rank
            # The draw in progress is that of the own examples already.
            with contextlib.nullcontext() if is_own else random.as_lane(lane):
                masks.append(self._mask(part))
        return probabilities * torch.cat(masks)

    def _mask(self, part: torch.Tensor) -> torch.Tensor:
        group = self.tensor_group
        num_examples, heads, *rest = part.shape
        ones = part.new_ones((num_examples, heads * group.size, *rest))
        mask = F.dropout(ones, self.p, self.training)
        return mask[:, heads * group.rank : heads * (group.rank + 1)]


class SlicedDropout:
    """Drops from slices of a batch what is dropped from the whole batch, slice by slice.

    Args:
        dropout: of the whole batch; called once, for the first slice.
        sizes: of the slices, along dim 0.
    """

    def __init__(self, dropout: nn.Dropout, sizes: Sequence[int]) -> None:
        self._dropout = dropout
        self._sizes = list(sizes)
        self._kept: list[torch.Tensor] = []

    @property
    def is_active(self) -> bool:
        """Whether it drops anything now."""
        return self._dropout.training and self._dropout.p > 0

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the next slice without what is dropped."""
        if not self.is_active:
            return part
        share = self._dropout.p
        if not self._kept:
            ones = part.new_ones((sum(self._sizes), *part.shape[1:]))
            self._kept = list((self._dropout(ones) == 0).split(self._sizes))
        scale = 1 / (1 - share) if share < 1 else 1.0
        return (part * scale).masked_fill(self._kept.pop(0), 0)
