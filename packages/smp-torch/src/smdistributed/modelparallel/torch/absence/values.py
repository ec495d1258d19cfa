"""Values of absent tensors that the ranks of a pipeline compute together.

What each partition has a part of, such as a norm of all gradients, is absent on every rank, and
every rank asks for it at the same place of the script. The ranks tell each other how it came about.
Where one has what the others lack it sends it; the rest is computed on all of them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import CommError, UnsupportedError
from smdistributed.modelparallel.torch.absence.notes import (
    REMEDY,
    Origin,
    Source,
    name_of,
    shortened,
)
from smdistributed.modelparallel.torch.compat.calling_line import calling_line
from smdistributed.modelparallel.torch.compat.private.modes import pytree
from smdistributed.modelparallel.torch.compat.private.tensors import version_of

#: Gives every rank of the pipeline what each one has.
Exchange = Callable[[Any], list[Any]]
#: The same thing in the lists of all ranks.
_Same = tuple[int, ...]


@dataclass(frozen=True)
class _Line:
    """One thing in the list of a rank: a tensor that it has, one that it lacks, or a call.

    Attributes:
        kind: "here", "elsewhere", "changed" or "call".
        what: of a call, the name of its function and which of its tensors; else a shape.
        needs: the numbers of its arguments in the list.
    """

    kind: str
    what: tuple[Any, ...] = ()
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Question:
    """What Python asks of an absent tensor.

    Attributes:
        source: how the tensor came about.
        origin: which ranks have what it depends on.
        what: the function that asks, for messages.
        is_everywhere: whether every rank asks at this place: Python asks, not a parameter of one
            rank that is written to.
        place: the name of the value here, where one rank has left it.
    """

    source: Source
    origin: Origin
    what: str
    is_everywhere: bool
    place: str

    @property
    def owner(self) -> int | None:
        """The place in the pipeline of the one rank that has the value, and leaves it."""
        if self.source.known is not None or not self.origin.is_told:
            return None
        return next(iter(self.origin.owners)) if len(self.origin.owners) == 1 else None

    def refusal(self) -> UnsupportedError:
        """Returns the error where there is no answer."""
        return UnsupportedError(
            f"{self.what} asks for a value of {shortened(self.origin.names)}, which another "
            "partition has, or of what was computed from it. Ranks tell each other such values "
            "where every rank asks for them, at the same line, and not some of them by "
            f"themselves: take it on every rank, by value = float(value), and print it on one. "
            f"{REMEDY}"
        )


def answer(question: Question, exchange: Exchange, own: int, device: torch.device) -> torch.Tensor:
    """Returns what an absent tensor is. Collective, unless it is known already.

    Args:
        question: which tensor.
        exchange: with the ranks of the pipeline.
        own: the place of this rank among them.
        device: where values are computed.

    Raises:
        UnsupportedError: it is not known, or the other ranks do not ask for it.
    """
    source = question.source
    if (known := source.known) is not None:
        return known
    is_local = not question.origin.names
    listed = _Listed(source, shapes_alone=is_local)
    if not listed.tensors:
        raise question.refusal()
    if is_local:
        exchange, own = _with_oneself, 0
    elif not question.is_everywhere:
        raise question.refusal()
    try:
        told = exchange((calling_line(), listed.lines))
        everyones = [lines for _, lines in told]
        places = _in_order(everyones) if len({place for place, _ in told}) == 1 else None
        if places is None:
            raise question.refusal()
        first = {same: _first_with(same, everyones) for same in places}
        mine = [same[own] for same in places if first[same] == own]
        received = exchange({number: listed.tensors[number].detach().cpu() for number in mine})
    except CommError as error:
        raise question.refusal() from error
    values: dict[_Same, torch.Tensor] = {}
    for same in places:
        rank = first[same]
        if rank is not None:
            values[same] = received[rank][same[rank]].to(device)
        else:
            needs = [values[each] for each in _needs(same, everyones)]
            values[same] = _run(listed.sources[same[own]], needs)
            # What one rank has may see the memory of a parameter, which changes: not kept.
            listed.sources[same[own]].keep(values[same])
    return values[places[-1]]


def _with_oneself(mine: Any) -> list[Any]:
    return [mine]


class _Listed:
    """What stands behind a value on this rank; the value itself comes first.

    Attributes:
        lines: what is told to the other ranks.
        tensors: those that are here, by number.
        sources: of calls, by number.
    """

    def __init__(self, source: Source, *, shapes_alone: bool) -> None:
        self.lines: list[_Line] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.sources: dict[int, Source] = {}
        known: dict[tuple[int, int], int] = {}
        waiting: collections.deque[Any] = collections.deque([source])
        while waiting:
            each = waiting.popleft()
            number = len(self.lines)
            if isinstance(each, Source) and each.like is not None and shapes_alone:
                each = torch.zeros((), dtype=each.like.dtype).expand(each.like.shape)
            if isinstance(each, Source) and each.known is not None:
                each = each.known
            if isinstance(each, torch.Tensor):
                self.tensors[number] = each
                self.lines.append(_Line("here", tuple(each.shape)))
            elif each.call is None:
                self.lines.append(_Line("elsewhere" if each.is_own else "changed"))
            else:
                self.sources[number] = each
                needs = []
                for one in _arguments(each):
                    key = (id(one.call), one.place) if isinstance(one, Source) else (id(one), 0)
                    if key not in known or (isinstance(one, Source) and one.call is None):
                        known[key] = number + 1 + len(waiting)
                        waiting.append(one)
                    needs.append(known[key])
                what = name_of(each.call.function), each.place
                self.lines.append(_Line("call", what, tuple(needs)))


def _arguments(source: Source) -> list[torch.Tensor | Source]:
    """Returns the tensors among the arguments of a call, unless they were written to since."""
    assert source.call is not None
    versions = iter(source.call.versions)
    return [
        each if isinstance(each, Source) or version_of(each) == next(versions) else Source()
        for each in pytree.tree_leaves(source.call.args)
        if isinstance(each, torch.Tensor | Source)
    ]


def _first_with(same: _Same, everyones: list[list[_Line]]) -> int | None:
    """Returns the first rank that has a tensor."""
    for rank, number in enumerate(same):
        if everyones[rank][number].kind == "here":
            return rank
    return None


def _needs(same: _Same, everyones: list[list[_Line]]) -> list[_Same]:
    """Returns what a call takes, on all ranks."""
    lines = [everyones[rank][number] for rank, number in enumerate(same)]
    return list(zip(*(line.needs for line in lines), strict=True))


def _in_order(everyones: list[list[_Line]]) -> list[_Same] | None:
    """Returns what is sent or computed, each after what it needs; None where that cannot be.

    The last one is what was asked for.
    """
    start: _Same = (0,) * len(everyones)
    found: dict[_Same, None] = {}
    pending = [(start, False)]
    while pending:
        same, is_ready = pending.pop()
        if same in found:
            continue
        lines = [everyones[rank][number] for rank, number in enumerate(same)]
        here = {line.what for line in lines if line.kind == "here"}
        if is_ready or here:
            if len(here) > 1:
                return None
            found[same] = None
            continue
        first = lines[0]
        alike = (line.what == first.what and len(line.needs) == len(first.needs) for line in lines)
        if any(line.kind != "call" for line in lines) or not all(alike):
            return None
        pending.append((same, True))
        pending += [(each, False) for each in _needs(same, everyones)]
    return list(found)


def _run(source: Source, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Makes a call again, with values."""
    assert source.call is not None
    given = iter(tensors)
    taken: list[torch.Tensor] = []

    def value(each: Any) -> Any:
        if not isinstance(each, torch.Tensor | Source):
            return each
        taken.append(next(given).clone())  # the call may write to it
        return taken[-1]

    args, kwargs = pytree.tree_map(value, source.call.args)
    with torch.no_grad():
        result = source.call.function(*args, **kwargs)
    if source.place < 0:
        return taken[-1 - source.place]
    made = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    return made[source.place]
