"""The parts of a transformer layer's blocks, between which slices of a batch take turns.

A block is what a layer has two of: attention, and what comes after it. Own examples are normed and
gathered, each rank computes its share of the result for the examples of all, and the sum of the
shares comes back to own examples. Only what lies between gathering and summing needs much
computation; the rest can be done for one slice while that is done for another.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.nn.between_blocks import crossed
from smdistributed.modelparallel.torch.nn.dropout import SlicedDropout
from smdistributed.modelparallel.torch.nn.options import LayerOptions
from smdistributed.modelparallel.torch.nn.parts import Projection, residual
from smdistributed.modelparallel.torch.tensor_parallel.exchange import leave
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import (
    Entered,
    Map,
    entered,
)
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule

#: Of a block: those that gathered examples are multiplied by, and last the one behind them.
Maps = tuple[Map, ...]


class Block(DistributedModule):
    """A block that reads own examples and returns them.

    Attributes:
        options: of the layer.
        dropout: of its output.
        pre_layernorm: what own examples are normed by before they are gathered, if they are.
        layernorm: what it ends in, if that is a norm.
    """

    options: LayerOptions
    dropout: nn.Dropout
    pre_layernorm: nn.LayerNorm | None
    layernorm: nn.LayerNorm | None

    @property
    def last(self) -> Projection:
        """The map whose shares are summed.

        :meta private:
        """
        raise NotImplementedError

    def maps(self) -> Maps:
        """Returns the linear maps.

        :meta private:
        """
        raise NotImplementedError

    def share(self, given: Entered, maps: Maps, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Examples of all ranks -> the own share of a sum.

        :meta private:

        Args:
            given: the examples.
            maps: the block's.
            mask: of the examples of all ranks, for the own heads.
        """
        raise NotImplementedError

    def entering(self, hidden: torch.Tensor) -> torch.Tensor:
        """Own examples, as they came -> what is gathered.

        :meta private:
        """
        return hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)

    def leaving(
        self,
        share: torch.Tensor,
        sizes: Sizes,
        hidden: torch.Tensor,
        drop: SlicedDropout,
        following: Block | None,
    ) -> tuple[torch.Tensor, Entered | None]:
        """The own share of a sum -> the output, and what the next block reads.

        Collective: TP_GROUP, of several ranks that have different examples.

        :meta private:

        Args:
            share: of the examples of all ranks.
            sizes: the examples of each.
            hidden: own examples, as they came.
            drop: drops elements.
            following: the next block, if there is one.
        """
        group, bias, post = self.tensor_group, self.last.bias, self.layernorm
        pre = None if following is None else following.pre_layernorm
        norm = post or pre
        in_fp32 = self.options.fp32_residual_addition and hidden.dtype != torch.float32
        if bias is None or not _is_affine(norm) or drop.is_active or in_fp32:
            summed = leave(group, share, sizes)
            made = self._with_residual(drop(summed if bias is None else summed + bias), hidden)
        else:
            gathers = following is not None and (post is None or pre is None)
            total, normed, everyones = crossed(
                group, share, sizes, bias, hidden, norm, gathers=gathers
            )
            made = total if post is None else normed
            if gathers:
                return made, entered(group, normed, sizes, everyones)
        if following is None:
            return made, None
        return made, entered(group, following.entering(made), sizes)

    def _branch(self, summed: torch.Tensor) -> torch.Tensor:
        """Returns what a sum adds to the own examples."""
        bias = self.last.bias
        dropped: torch.Tensor = self.dropout(summed if bias is None else summed + bias)
        return dropped

    def _with_residual(self, branch: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        in_fp32 = self.options.fp32_residual_addition
        return residual(branch, hidden, self.layernorm, in_fp32=in_fp32)


def _is_affine(norm: nn.LayerNorm | None) -> TypeGuard[nn.LayerNorm]:
    """Whether there is a norm, with weight and bias."""
    return norm is not None and norm.weight is not None and norm.bias is not None
