"""The tensors of the calls of all ranks, each of which computes its slices of every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from smdistributed.modelparallel.torch.collectives.streams import Mark
from smdistributed.modelparallel.torch.compat.between import no_call
from smdistributed.modelparallel.torch.tensor_parallel.auto.agreement import LaneCall
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call, has_gaps
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
        own_is_alike: tensors of the own call require gradients where others' do, so that it is
            differentiated where theirs are.

    Attributes:
        own: the tensors of the own call.

    Raises:
        SMPError: tensors in one place have different types.
    """

    def __init__(
        self,
        group: TensorGroup,
        who: str,
        call: Call,
        lanes: Sequence[LaneCall],
        *,
        own_is_alike: bool = False,
    ) -> None:
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
        own = {path: move.own(tensors.get(path)) for path, move in self._moves.items()}
        if group.is_prescaled:
            own = {path: _entered(group, self._moves[path], each) for path, each in own.items()}
        else:
            if own_is_alike:
                own = {path: self._moves[path].like_others(each) for path, each in own.items()}
            self._begin(own)
        self.own = self._with_same({path: own[path] for path in own if path in tensors})

    def arrived(self) -> list[dict[str, torch.Tensor]]:
        """Returns the tensors of all calls, after the own has been computed.

        Not of a prescaled batch, whose ranks all make the own call.
        """
        group = self._group
        everyones: dict[str, Sequence[torch.Tensor]] = {}
        for path, each in self._travelling.items():
            others = arrived(group, each)
            everyones[path] = [*others[: group.rank], each.token, *others[group.rank :]]
        if not everyones:  # else what came after the constants has been waited for
            every = [each for constants in self._constants.values() for each in constants]
            group.stream.wait(self._mark, every)
        everyones.update(self._constants)
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(group.size)]
        for path, parts in everyones.items():
            move = self._moves[path]
            for number, part in enumerate(parts):
                if number != group.rank and move.shapes[number] is not None:
                    found[number][path] = move.as_laid_out(number, part)
        lanes = list(map(self._with_same, found))
        lanes[group.rank] = self.own
        return lanes

    def _begin(self, own: dict[str, torch.Tensor]) -> None:
        """Sends what the own call has."""
        group, moves = self._group, self._moves
        constants = [path for path in own if not moves[path].needs_gradient]
        if constants:
            given = [moves[path].given(group.rank, own[path]) for path in constants]
            sizes = [moves[path].sizes for path in constants]
            made = constants_to_lanes(group, given, sizes)
            self._constants = dict(zip(constants, made, strict=True))
        for path, tensor in own.items():
            if moves[path].needs_gradient:
                given_ = moves[path].given(group.rank, tensor)
                self._travelling[path] = to_lanes(group, given_, moves[path].sizes)
        if not self._travelling:
            self._mark = group.stream.mark()

    def _with_same(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        same = {path: tensors[first] for path, first in self._same.items() if first in tensors}
        return tensors | same


def _entered(group: TensorGroup, move: _Move, tensor: torch.Tensor) -> torch.Tensor:
    return enter(group, move.like_others(tensor), [tensor.shape[0]] if tensor.dim() else [1])


class _Move(NamedTuple):
    """How the tensors at one place of all calls come to every rank.

    Attributes:
        shapes: of each rank's; None where its call has none.
        orders: of each rank's, the dims in the order of its memory, see ``Hole``.
        dtype, device: of all.
        needs_gradient: that of some rank requires one; then all do.
        has_gaps: the own one cannot lie in memory for others as it does here.
    """

    shapes: list[tuple[int, ...] | None]
    orders: list[tuple[int, ...] | None]
    dtype: torch.dtype
    device: torch.device
    needs_gradient: bool
    has_gaps: bool

    @property
    def sizes(self) -> Shapes:
        """The shapes of what ranks give: something without numbers where a call has none."""
        pairs = zip(self.shapes, self.orders, strict=True)
        return tuple(
            (0,) if shape is None else tuple(shape[dim] for dim in order or range(len(shape)))
            for shape, order in pairs
        )

    def own(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Returns what the own call has; where it has no tensor, what takes part as well."""
        if tensor is None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return tensor.clone() if self.has_gaps else tensor

    def given(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what a rank gives the others of its own tensor."""
        order = self.orders[rank]
        return self.like_others(tensor if order is None else tensor.permute(order))

    def like_others(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that requires a gradient if that of another rank does."""
        needs_one = self.needs_gradient and not tensor.requires_grad
        return tensor.detach().requires_grad_() if needs_one else tensor

    def as_laid_out(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what a rank has given as it lies in its memory: what is dropped goes by that."""
        order = self.orders[rank]
        if order is None:
            return tensor
        return tensor.permute([order.index(dim) for dim in range(len(order))])


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
            [None if each is None else each[1].order for each in theirs],
            kinds.pop(),
            next((each.device for each in own.values()), group.stream.device),
            needed and torch.is_grad_enabled(),
            path in own and has_gaps(own[path]),
        )
    return moves
