"""A linear map with heads and what all of them share in its outputs, as keys of one head.

Each rank computes its share of what can be shared, and all of the rest. The weight stays whole, as
no slice of it is that of one rank alone; its gradient is the sum over the ranks, as that of any
parameter that every rank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.tensor_parallel.auto.split_linear import Gate


class Section(NamedTuple):
    """Outputs that lie side by side: how many, and whether each rank has a share of them."""

    length: int
    is_split: bool


class PartLinear(nn.Linear):
    """Stands for a linear map of which a rank computes a part of the outputs; made in place.

    Shape: ``(..., in)`` to ``(..., out)`` of the own shares and what is not split.
    """

    sections: tuple[Section, ...]
    gate: Gate
    size: int
    rank: int

    @staticmethod
    def make_of(
        module: nn.Module, sections: tuple[Section, ...], gate: Gate, size: int, rank: int
    ) -> None:
        """Makes a linear map one of a part of its outputs.

        Args:
            module: which becomes it.
            sections: of its outputs.
            gate: opened by the module around it.
            size: how many ranks there are.
            rank: which of them this is.
        """
        module.__class__ = PartLinear
        vars(module).update(sections=sections, gate=gate, size=size, rank=rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Applies the own part of the map, or all of it where each rank computes by itself."""
        if self.gate.is_whole or not self.gate.is_open:
            return F.linear(input, self.weight, self.bias)
        weight = torch.cat(list(self._own(self.weight)))
        bias = None if self.bias is None else torch.cat(list(self._own(self.bias)))
        return F.linear(input, weight, bias)

    def _own(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        start = 0
        for length, is_split in self.sections:
            own = length // self.size if is_split else length
            yield whole.narrow(0, start + self.rank * own * is_split, own)
            start += length
