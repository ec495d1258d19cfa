"""What the ranks of a group tell each other when they call a module that was split as it is."""

from __future__ import annotations

import base64
import pickle
import zlib
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call, Hole, TensorForm
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.words import LENGTH

#: So many sizes travel with the first comparison of a call.
_SIZES = LENGTH - 4
#: So many forms of calls are remembered.
_MOST_KNOWN = 1000


@dataclass(frozen=True)
class LaneCall:
    """The call of one rank.

    Attributes:
        call: with holes for its tensors.
        shapes: of these.
    """

    call: Call
    shapes: tuple[tuple[int, ...], ...]

    @property
    def forms(self) -> list[TensorForm]:
        """The forms of its tensors."""
        pairs = zip(self.shapes, self.call.holes, strict=True)
        return [TensorForm(shape, hole.dtype) for shape, hole in pairs]

    def at(self, path: str) -> tuple[tuple[int, ...], Hole] | None:
        """Returns shape and kind of the tensor at a path; None where this call has none."""
        paths = list(self.call.paths)
        if path not in paths:
            return None
        return self.shapes[paths.index(path)], self.call.holes[paths.index(path)]


@run_as_written
def agreed(
    group: TensorGroup,
    who: str,
    call: Call,
    *,
    training: bool,
    has_changed: bool,
    makes_shapes: bool,
) -> tuple[list[LaneCall], bool]:
    """Returns the calls of all ranks, which may differ in sizes and in what they leave out.

    Collective: TP_GROUP.

    Args:
        group: the ranks.
        who: is called.
        call: the own.
        training: whether the module trains.
        has_changed: whether a script has changed what proofs of this rank's module have read.
        makes_shapes: this rank alone makes the call, see ``TensorGroup``.

    Returns:
        the calls, and whether the module of any rank has changed.

    Raises:
        SMPError: the ranks call different modules; or with a prescaled batch in different ways.
    """
    tensors = call.tensors
    own = tuple(tuple(each.shape) for each in tensors)
    if makes_shapes:
        return [LaneCall(call, own)] * group.size, has_changed
    sizes = [size for each in own for size in each]
    about = zlib.crc32(repr((who, training, torch.is_grad_enabled())).encode())
    form = zlib.crc32(f"{call.structure}{call.holes}{_plain(call)}".encode())
    head = [about, form, int(has_changed), len(sizes)]
    first = [*head, *sizes[:_SIZES], *[0] * (_SIZES - len(sizes))]
    everyones = group.call(who, first)
    if any(each[0] != about for each in everyones):
        group.refuse(
            "must call the same distributed modules in the same way",
            f"{who} with {[(tuple(each.shape), each.dtype) for each in tensors]}",
        )
    most = max(each[3] for each in everyones)
    listed = [each[len(head) :] for each in everyones]
    if most > _SIZES:
        rest = sizes[_SIZES:]
        rests = group.collectives.compare([*rest, *[0] * (most - _SIZES - len(rest))])
        listed = [[*some, *more] for some, more in zip(listed, rests, strict=True)]
    known = group.known_calls
    if any(each[1] not in known for each in everyones):
        if len(known) > _MOST_KNOWN:
            known.clear()
        text = base64.b64encode(pickle.dumps(call.skeleton())).decode()
        texts = group.collectives.compare_texts(text)
        for each, theirs in zip(everyones, texts, strict=True):
            known[each[1]] = Call(pickle.loads(base64.b64decode(theirs)))
    lanes = [_lane(known[each[1]], theirs) for each, theirs in zip(everyones, listed, strict=True)]
    if group.is_prescaled and any(
        (each[1], lane.shapes) != (form, own) for each, lane in zip(everyones, lanes, strict=True)
    ):
        group.refuse("must bring the same examples, as prescaled_batch is on", f"{who}: {own}")
    return lanes, any(each[2] for each in everyones)


def same_verdict(group: TensorGroup, who: str, mine: str, error: SMPError | None) -> None:
    """Checks that the ranks come to the same verdict on slices. Collective: TP_GROUP.

    Args:
        group: the ranks.
        who: was tried.
        mine: what this rank has found.
        error: why it has found nothing.

    Raises:
        SMPError: they do not, or a rank has found nothing.
    """
    everyones = group.everyones_texts(mine if error is None else str(error))
    if error is not None:
        raise error
    for rank, theirs in enumerate(everyones):
        if theirs != mine:
            raise SMPError(
                f"the ranks of a tensor-parallel group must come to the same verdict on slices of "
                f"{who}, so its code and state must be the same on each; tp_rank {group.rank} has "
                f"found {mine}; tp_rank {rank}: {theirs}"
            )


def _lane(call: Call, sizes: list[int]) -> LaneCall:
    shapes, start = [], 0
    for hole in call.holes:
        shapes.append(tuple(sizes[start : start + hole.num_dims]))
        start += hole.num_dims
    return LaneCall(call, tuple(shapes))


def _plain(call: Call) -> list[object]:
    return [leaf for leaf in call.leaves if not isinstance(leaf, torch.Tensor)]
