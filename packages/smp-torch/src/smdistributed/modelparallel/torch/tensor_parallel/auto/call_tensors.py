"""The tensors of the calls of all ranks, each of which computes its slices of every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from smdistributed.modelparallel.torch.collectives.streams import Mark
from smdistributed.modelparallel.torch.compat.between import no_call
from smdistributed.modelparallel.torch.tensor_parallel.auto.agreement import LaneCall
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.lanes import (
    Shapes,
    Travelling,
    arrived,
    constants_to_lanes,
    to_lanes,
)
from smdistributed.modelparallel.torch.tensor_parallel.exchange import enter
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup


class CallTensors:
    """Gives every rank the tensors of all calls, by path. Collective: TP_GROUP.

    Args:
        group: the ranks.
        who: is called.
        call: the own.
        lanes: those of all ranks.

    Attributes:
        own: the tensors of the own call.

    Raises:
        SMPError: tensors in one place have different types.
    """

    def __init__(self, group: TensorGroup, who: str, call: Call, lanes: Sequence[LaneCall]) -> None:
        self._group = group
        self._moves: dict[str, _Move] = {}
        #: Paths at which a tensor is that of another path.
        self._same: dict[str, str] = {}
        self._constants: dict[str, tuple[torch.Tensor, ...]] = {}
        self._mark: Mark | None = None
        self._travelling: dict[str, Travelling] = {}
        tensors = dict(zip(call.paths, call.tensors, strict=True))
        for path, move in _moves(group, who, tensors, lanes).items():
            if isinstance(move, str):
                self._same[path] = move
            else:
                self._moves[path] = move
        given = {path: move.own(tensors.get(path)) for path, move in self._moves.items()}
        if group.is_prescaled:
            given = {path: _entered(group, each) for path, each in given.items()}
        else:
            given = self._begin(given)
        self.own = self._with_same({path: given[path] for path in given if path in tensors})

    def arrived(self) -> list[dict[str, torch.Tensor]]:
        """Returns the tensors of all calls, after the own has been computed.

        Not of a prescaled batch, whose ranks all make the own call.
        """
        group = self._group
        everyones: dict[str, Sequence[torch.Tensor]] = {
            path: arrived(group, each) for path, each in self._travelling.items()
        }
        if not everyones:  # else what came after the constants has been waited for
            every = [each for constants in self._constants.values() for each in constants]
            group.stream.wait(self._mark, every)
        everyones.update(self._constants)
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(group.size)]
        for path, parts in everyones.items():
            for lane, shape, part in zip(found, self._moves[path].shapes, parts, strict=True):
                if shape is not None:
                    lane[path] = part
        return list(map(self._with_same, found))

    def _begin(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sends what is given; returns that for the own call."""
        group, moves = self._group, self._moves
        constants = {path: each for path, each in given.items() if not moves[path].needs_gradient}
        if constants:
            sizes = [moves[path].sizes for path in constants]
            made = constants_to_lanes(group, list(constants.values()), sizes)
            self._constants = dict(zip(constants, made, strict=True))
        for path, tensor in given.items():
            if path not in constants:
                self._travelling[path] = to_lanes(group, tensor, moves[path].sizes)
        if not self._travelling:
            self._mark = group.stream.mark()
        return constants | {path: each.own for path, each in self._travelling.items()}

    def _with_same(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        same = {path: tensors[first] for path, first in self._same.items() if first in tensors}
        return tensors | same


def _entered(group: TensorGroup, tensor: torch.Tensor) -> torch.Tensor:
    return enter(group, tensor, [tensor.shape[0]] if tensor.dim() else [1])


class _Move(NamedTuple):
    """How the tensors at one place of all calls come to every rank.

    Attributes:
        shapes: of each rank's; None where its call has none.
        dtype, device: of all.
        needs_gradient: that of some rank requires one; then all do.
        is_laid_out_otherwise: the own one lies in memory in another way than it comes to others;
            what is dropped goes by that.
    """

    shapes: list[tuple[int, ...] | None]
    dtype: torch.dtype
    device: torch.device
    needs_gradient: bool
    is_laid_out_otherwise: bool

    @property
    def sizes(self) -> Shapes:
        """The shapes of what ranks give: something without numbers where a call has none."""
        return tuple((0,) if each is None else each for each in self.shapes)

    def own(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Returns what a rank gives whose call has a tensor; or none, which takes part as well."""
        if tensor is None:
            tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        if self.is_laid_out_otherwise:
            tensor = tensor.contiguous()
        if self.needs_gradient and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        return tensor


# What is asked of tensors here is no part of a pass: of shapes alone it is asked otherwise.
@no_call
def _moves(
    group: TensorGroup, who: str, own: Mapping[str, torch.Tensor], lanes: Sequence[LaneCall]
) -> dict[str, _Move | str]:
    """Returns by path how tensors come to every rank, or the path where they are there before."""
    moves: dict[str, _Move | str] = {}
    for path in dict.fromkeys(path for lane in lanes for path in lane.call.paths):
        first = lanes[0].call.same.get(path)
        if first is not None and all(each.call.same.get(path) == first for each in lanes):
            moves[path] = first
            continue
        theirs = [lane.at(path) for lane in lanes]
        kinds = {each[1].dtype for each in theirs if each is not None}
        if len(kinds) > 1:
            mine = own[path].dtype if path in own else "nothing"
            group.refuse("must call modules with the same types", f"{who} with {mine}")
        needed = any(each is not None and each[1].requires_grad for each in theirs)
        moves[path] = _Move(
            [None if each is None else each[0] for each in theirs],
            kinds.pop(),
            next(iter(own.values())).device,
            needed and torch.is_grad_enabled(),
            path in own and not own[path].is_contiguous(),
        )
    return moves
