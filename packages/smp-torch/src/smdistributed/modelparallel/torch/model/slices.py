"""Between whole tensors and the slices of them that tensor-parallel ranks hold, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.model.holder import Holder, slice_at
from smdistributed.modelparallel.torch.record.nested import map_tensors, tensors_in
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensor_parallel.module import Slice


class SlicedTensors:
    """The split parameters of a model, or of the models of an optimizer.

    Args:
        runtime: the state of the library in this process.
        slices: of each split parameter, by name.
    """

    def __init__(self, runtime: TorchRuntime, slices: Mapping[str, Slice]) -> None:
        self._runtime = runtime
        self._slices = slices
        self._size = runtime.topology.tp_size

    @classmethod
    def of(cls, runtime: TorchRuntime, holders: Mapping[str, Holder]) -> SlicedTensors:
        """Returns those of some models, whose names begin with what they are given by."""
        return cls(
            runtime,
            {
                f"{prefix}{holder.fakes.slot_name(slot)}": found
                for prefix, holder in holders.items()
                for slot in holder.fakes.slots
                if (found := slice_at(slot)) is not None
            },
        )

    def __contains__(self, name: object) -> bool:
        return name in self._slices

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __bool__(self) -> bool:
        return bool(self._slices)

    @property
    def group(self) -> CommGroup:
        """The ranks that hold the model together."""
        return CommGroup.MP_GROUP if self._slices else CommGroup.PP_GROUP

    def tp_ranks(self, group: CommGroup) -> list[int]:
        """Returns the tensor-parallel rank of each rank of a group."""
        topology = self._runtime.topology
        members = topology.members(group, self._runtime.rank)
        return [topology.coordinates(rank).tp_rank for rank in members]

    def cut(self, name: str, structure: Any) -> Any:
        """Returns what is here of the tensors that belong to a parameter, by their shapes."""
        if name not in self._slices:
            return structure
        own = self._slices[name]
        part = own.part(self._size, self._runtime.coordinates.tp_rank)
        index = part.within(Rectangle.whole(own.shape))

        def of_one(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[index].clone() if tuple(tensor.shape) == own.shape else tensor

        return map_tensors(structure, of_one)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole parameter."""
        return self._slices[name].shape

    def join(self, name: str, structures: Mapping[int, Any]) -> Any:
        """Returns the whole tensors that belong to a parameter.

        Args:
            name: of the parameter.
            structures: the same structure of each tensor-parallel rank.
        """
        own = self._slices[name]
        ranks = sorted(structures)
        listed: list[list[torch.Tensor]] = []
        for rank in ranks:
            found: list[torch.Tensor] = []
            found += tensors_in(structures[rank])
            listed.append(found)
        places = iter(range(len(listed[0])))

        def of_one(first: torch.Tensor) -> torch.Tensor:
            place = next(places)
            if tuple(first.shape) != own.part(self._size, ranks[0]).sizes:
                return first
            whole = first.new_empty(own.shape)
            for rank, tensors in zip(ranks, listed, strict=True):
                part = own.part(self._size, rank)
                whole[part.within(Rectangle.whole(own.shape))] = tensors[place].to(whole.device)
            return whole

        return map_tensors(structures[ranks[0]], of_one)

    def merge(
        self, parts: list[Mapping[str, Any]], group: CommGroup | None = None
    ) -> dict[str, Any]:
        """Returns by name what the ranks of a group gave, by default ``group``; slices joined."""
        merged: dict[str, Any] = {}
        slices: dict[str, dict[int, Any]] = {}
        for tp_rank, part in zip(self.tp_ranks(group or self.group), parts, strict=True):
            for name, value in part.items():
                if name in self._slices:
                    slices.setdefault(name, {})[tp_rank] = value
                else:
                    merged[name] = value
        merged.update((name, self.join(name, each)) for name, each in slices.items())
        return merged

    def to_send(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the others lack of the own part: of whole tensors one rank speaks."""
        speaks = self._runtime.coordinates.tp_rank == 0 or not self._slices
        return {name: value for name, value in part.items() if speaks or name in self._slices}
