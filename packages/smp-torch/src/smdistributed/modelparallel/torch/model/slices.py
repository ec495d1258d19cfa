"""Between whole tensors and the pieces of them that ranks hold, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.pieces import Piece, Rectangle, covers
from smdistributed.modelparallel.torch.model.holder import Holder
from smdistributed.modelparallel.torch.parts.blocks import put, taken
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, tensors_in


class SlicedTensors:
    """The parameters of a model, or of the models of an optimizer, that are in several pieces.

    Pieces are slices of tensor parallelism, shards, or shards of slices.

    Args:
        runtime: the state of the library in this process.
        pieces: of each such parameter, by name.
        own: the piece of each that is here, or would be on the own partition.
        has_shards: whether some are shards, which ranks of other replicas have.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        pieces: Mapping[str, Sequence[Piece]],
        own: Mapping[str, Piece],
        *,
        has_shards: bool,
    ) -> None:
        self._runtime = runtime
        self._pieces = pieces
        self._own = own
        self._has_shards = has_shards

    @classmethod
    def of(cls, runtime: TorchRuntime, holders: Mapping[str, Holder]) -> SlicedTensors:
        """Returns those of some models, whose names begin with what they are given by."""
        pieces: dict[str, Sequence[Piece]] = {}
        own: dict[str, Piece] = {}
        for prefix, holder in holders.items():
            for name, found, here in holder.in_pieces():
                pieces[f"{prefix}{name}"], own[f"{prefix}{name}"] = found, here
        has_shards = any(each.has_shards for each in holders.values())
        return cls(runtime, pieces, own, has_shards=has_shards)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def group(self) -> CommGroup:
        """The ranks that hold the model together."""
        if self._has_shards:
            return CommGroup.WORLD
        return CommGroup.MP_GROUP if self._pieces else CommGroup.PP_GROUP

    def cut(self, name: str, structure: Any) -> Any:
        """Returns what is here of the tensors that belong to a parameter, by their shapes."""
        if name not in self._pieces:
            return structure
        own = self._own[name]

        def of_one(tensor: torch.Tensor) -> torch.Tensor:
            return taken(tensor, own.part).clone() if tuple(tensor.shape) == own.shape else tensor

        return map_tensors(structure, of_one)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole parameter."""
        return self._own[name].shape

    def join(self, name: str, structures: Mapping[int, Any]) -> Any:
        """Returns the whole tensors that belong to a parameter.

        Args:
            name: of the parameter.
            structures: the same structure of each rank that has a piece.

        Raises:
            CheckpointError: some of it is on none of these ranks.
        """
        shape = self.whole_shape(name)
        at = self._runtime.topology.coordinates
        # A name can come from another partition, so only the other coordinates count.
        places_of = {
            (at(rank).tp_rank, at(rank).rdp_cp_rank): piece.part
            for piece in self._pieces[name]
            for rank in piece.ranks
        }
        parts = {rank: places_of[at(rank).tp_rank, at(rank).rdp_cp_rank] for rank in structures}
        first_of = {part: rank for rank, part in reversed(list(parts.items()))}
        listed: dict[int, list[torch.Tensor]] = {}
        for rank in first_of.values():
            listed[rank] = []
            listed[rank] += tensors_in(structures[rank])
        first = next(iter(structures))
        if not covers(first_of, Rectangle.whole(shape)):
            raise CheckpointError(
                f"{name} is in {len(self._pieces[name])} pieces on several ranks, and the state "
                f"has {len(first_of)} of them: every rank must give what it has."
            )
        places = iter(range(len(listed[first])))

        def of_one(tensor: torch.Tensor) -> torch.Tensor:
            place = next(places)
            if tuple(tensor.shape) != parts[first].sizes:
                return tensor
            whole = tensor.new_empty(shape)
            for part, rank in first_of.items():
                put(whole, part, listed[rank][place])
            return whole

        return map_tensors(structures[first], of_one)

    def merge(
        self, parts: list[Mapping[str, Any]], group: CommGroup | None = None
    ) -> dict[str, Any]:
        """Returns by name what the ranks of a group gave, by default ``group``; pieces joined."""
        members = self._runtime.topology.members(group or self.group, self._runtime.rank)
        merged: dict[str, Any] = {}
        pieces: dict[str, dict[int, Any]] = {}
        for rank, part in zip(members, parts, strict=True):
            for name, value in part.items():
                if name in self._pieces:
                    pieces.setdefault(name, {})[rank] = value
                else:
                    merged[name] = value
        merged.update((name, self.join(name, each)) for name, each in pieces.items())
        return merged

    def gather(self, part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns whole tensors of which the ranks of a partition have pieces; on its first rank.

        Collective: DP_GROUP, each rank with the same names.
        """
        group, rank = CommGroup.DP_CP_GROUP, self._runtime.rank
        members = self._runtime.topology.members(group, rank)
        whole = {name: value for name, value in part.items() if name not in self}
        if len(whole) == len(part):
            return whole if rank == members[0] else {}
        given = self._runtime.communicator.gather(
            {
                name: value.cpu()
                for name, value in part.items()
                if name in self and self._own[name].speaker == rank
            },
            group,
        )
        if given is None:
            return {}
        for name in part.keys() - whole.keys():
            pieces = {
                at: each[name] for at, each in zip(members, given, strict=True) if name in each
            }
            whole[name] = self.join(name, pieces)
        return whole

    def to_send(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the others lack of the own part: of what several have one rank speaks."""
        place, rank = self._runtime.coordinates, self._runtime.rank
        if self._has_shards:
            return {
                name: value
                for name, value in part.items()
                if (self._own[name].speaker == rank if name in self else place.dp_cp_rank == 0)
            }
        speaks = place.tp_rank == 0 or not self._pieces
        return {name: value for name, value in part.items() if speaks or name in self._pieces}
