"""The parts of a transformer layer's blocks, between which slices of a batch take turns.

A block is what a layer has two of: attention, and what comes after it. Own examples are normed and
gathered, each rank computes its share of the result for the examples of all, and the sum of the
shares comes back to own examples. Only what lies between gathering and summing needs much
computation; the rest can be done for one slice while that is done for another.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from smdistributed.modelparallel.torch.nn.dropout import SlicedDropout
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import Entered, Map

#: Of a block: those that gathered examples are multiplied by, and last the one behind them.
Maps = tuple[Map, ...]


class Block(Protocol):
    """A block that reads own examples and returns them.

    Attributes:
        dropout: of its output.
        pre_layernorm: what own examples are normed by before they are gathered, if they are.
    """

    dropout: nn.Dropout
    pre_layernorm: nn.LayerNorm | None

    def entering(self, hidden: torch.Tensor) -> torch.Tensor:
        """Own examples, as they came -> what is gathered."""

    def maps(self) -> Maps:
        """Returns the linear maps."""

    def share(self, given: Entered, maps: Maps, mask: torch.Tensor | None) -> torch.Tensor:
        """Examples of all ranks -> the own share of a sum.

        Args:
            given: the examples.
            maps: the block's.
            mask: of the examples of all ranks, for the own heads.
        """

    def leaving(
        self,
        summed: torch.Tensor,
        hidden: torch.Tensor,
        drop: SlicedDropout,
        following: nn.LayerNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Own examples, the sum -> the output, and what the next block gathers.

        Args:
            summed: over the ranks.
            hidden: own examples, as they came.
            drop: drops elements.
            following: the norm at the beginning of the next block, if there is one.
        """
