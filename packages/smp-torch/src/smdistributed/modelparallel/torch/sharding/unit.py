"""A unit: parameters that are gathered and whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.below import give, past_operations
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all, storage_of
from smdistributed.modelparallel.torch.sharding.layout import UnitLayout
from smdistributed.modelparallel.torch.sharding.parameter import (
    Shard,
    ShardedParameter,
    ShardsHome,
)


class Unit:
    """Some parameters of a model, of one type, of which this rank has a block each.

    Args:
        number: of the unit in its model.
        named: the parameters with their names; they are cut by ``take``.
        layout: how their blocks lie.
        index: which rank of the sharding group this is.
        is_sliced: whether they are slices, which other tensor-parallel ranks hold otherwise.
        shard: for the blocks of this rank. Shape: (width,).

    Attributes:
        parameters: in the order of the model.
        memory: the whole parameters one after another while the unit is gathered; else None.
    """

    def __init__(
        self,
        number: int,
        named: Sequence[tuple[str, nn.Parameter]],
        layout: UnitLayout,
        index: int,
        is_sliced: bool,
        shard: torch.Tensor,
    ) -> None:
        self.number = number
        self.is_sliced = is_sliced
        self.parameters: list[Any] = [parameter for _, parameter in named]
        self.names = [name for name, _ in named]
        self._index = index
        self.dtype = self.parameters[0].dtype
        self.layout = layout
        self.num_elements = layout.num_elements
        self.shard = shard
        self.memory: torch.Tensor | None = None
        self._versions: list[int] = []

    @torch.no_grad()
    def take(self, place: int, whole: torch.Tensor, home: ShardsHome) -> None:
        """Keeps the own block of a parameter, which is a sharded one from now on.

        Args:
            place: of the parameter in the unit.
            whole: its values.
            home: where the unit is.
        """
        parameter = self.parameters[place]
        part, start = list(self.layout.places(self._index))[place]
        block = self.shard[start : start + part.num_elements].view(part.sizes)
        block.copy_(whole[part.within(type(part).whole(whole.shape))])
        shard = Shard(self.names[place], parameter.shape, part, block, home, self.number, place)
        shard.values.requires_grad_(parameter.requires_grad)
        with past_operations():
            parameter.data = shard.vacant
        parameter.__class__ = ShardedParameter
        parameter.shard = shard

    @property
    def shards(self) -> list[Shard]:
        """What this rank has of each parameter."""
        return [each.shard for each in self.parameters]

    @torch.no_grad()
    def lay_out(self, shards: torch.Tensor, memory: torch.Tensor) -> None:
        """Lays the blocks of all ranks out as whole parameters, one after another.

        Args:
            shards: of all ranks. Shape: (degree, width).
            memory: takes them. Shape: (num_elements,).
        """
        views = self.layout.views(memory)
        targets, sources = [], []
        for number, part, values in self.layout.blocks(shards):
            if part.num_elements:
                targets.append(views[number][part.within(type(part).whole(views[number].shape))])
                sources.append(values)
        copy_all(targets, sources)

    @torch.no_grad()
    def fill(self, memory: torch.Tensor) -> int:
        """Makes the parameters whole; returns by what their memory is known.

        Args:
            memory: has them one after another. Shape: (num_elements,).
        """
        with past_subclass_functions(), past_operations():
            for parameter, view in zip(self.parameters, self.layout.views(memory), strict=True):
                give(parameter, view)
            self._versions = [each._version for each in self.parameters]
        self.memory = memory
        return storage_of(memory)

    def empty(self) -> list[str]:
        """Lets the whole parameters go; what still views them keeps them alive.

        Returns:
            the names of those that something has written to since they are whole.
        """
        self.memory = None
        with past_subclass_functions(), past_operations():
            versions = [each._version for each in self.parameters]
            for parameter in self.parameters:
                give(parameter, parameter.shard.vacant)
        if versions == self._versions:
            return []
        pairs = zip(versions, self._versions, strict=True)
        return [name for name, (now, since) in zip(self.names, pairs, strict=True) if now != since]

    def blocks_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the own block of each parameter in a tensor of the shape of the shard."""
        return [
            flat[start : start + part.num_elements].view(part.sizes)
            for part, start in self.layout.places(self._index)
        ]
