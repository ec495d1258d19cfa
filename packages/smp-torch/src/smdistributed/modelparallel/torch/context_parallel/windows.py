"""Windows on a sequence of which a call has pieces, and those that it gives.

Pieces of several windows that are as long are moved to one of them before the call. A call that
moves tokens itself gives a window, or the sequence in blocks, by what ``moving`` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from smdistributed.modelparallel.torch.context_parallel.actions import Action, OfAligned, OfMoved
from smdistributed.modelparallel.torch.context_parallel.calls import Call
from smdistributed.modelparallel.torch.context_parallel.gathering import gives_views
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, sequence_of
from smdistributed.modelparallel.torch.context_parallel.moving import (
    Assembly,
    Source,
    assembly,
    target,
    whole_tokens,
)
from smdistributed.modelparallel.torch.context_parallel.refusals import has_backward_code
from smdistributed.modelparallel.torch.context_parallel.tokens import Moved, moved_tokens
from smdistributed.modelparallel.torch.context_parallel.way import Held, OfWholeSequence, Proven


class View(NamedTuple):
    """What the ranks have of the tensors of a call, some of which are moved for it.

    Attributes:
        held: what they have then.
        moves: what moves each tensor; None for those that stay.
    """

    held: list[Held]
    moves: list[Assembly | None]

    def before(self, whole: OfWholeSequence, found: Proven) -> Proven:
        """Returns what is done for a call with the moves before it."""
        if not any(self.moves):
            return found
        views = gives_views(
            *(whole.call.function, whole.call.spec, whole.call.leaves, whole.call.shapes),
            whole.results,
        )
        action: Action = OfAligned(tuple(self.moves), found.action, views is not False)
        return replace(found, action=action)


def views(held: Sequence[Held], group: ContextGroup) -> Iterator[View]:
    """Yields tensors as they are, and with pieces of some windows moved to another one."""
    yield View(list(held), [None] * len(held))
    windows = {each.layout.window: None for each in held if each.is_piece and each.layout}
    if len(windows) < 2:
        return
    for window in sorted(windows, key=lambda each: each is not None):
        pairs = [_moved_to(each, window, held, group) for each in held]
        if any(move is not None for _, move in pairs):
            yield View([one for one, _ in pairs], [move for _, move in pairs])


def _moved_to(
    held: Held, window: Any, among: Sequence[Held], group: ContextGroup
) -> tuple[Held, Assembly | None]:
    """Returns what a rank has of a tensor of which it gets the tokens of a window."""
    layout = held.layout
    if not held.is_piece or layout is None or layout.window == window:
        return held, None
    lengths = {
        each.layout.length_of(each.whole)
        for each in among
        if each.is_piece and each.layout and each.layout.window == window
    }
    other = replace(layout, window=window)
    size = held.whole[layout.dim]
    if layout.length_of(held.whole) not in lengths or not other.divides(size, group.size):
        return held, None
    size //= layout.outer
    move = assembly(
        *(whole_tokens(size), layout.dim, [Source(size, layout)], other, group),
        layout.outer,
    )
    return replace(held, layout=other), move


def of_tokens(
    whole: OfWholeSequence, call: Call, held: Sequence[Held], length: int, group: ContextGroup
) -> Proven | None:
    """Returns what is done for a call that moves tokens; None if it does anything else."""
    found = _tokens(whole, [each for each in held if each.is_piece], held)
    if found is None:
        return None
    dim, every, structure = found
    sources = [Source(each.whole[dim], each.layout if each.is_piece else None) for each in held]
    made, results = [], []
    for tokens, shape in zip(every, whole.results, strict=True):
        is_cut = any(run.source >= 0 and sources[run.source].layout for run in tokens.runs)
        if not is_cut or _is_all(tokens, sources):
            return None
        # One token is mostly one of all others'.
        one = tokens.length == 1
        layout = None if one else target(tokens, dim, sources, length, group.size)
        made.append(assembly(tokens, dim, sources, layout, group))
        results.append(Held(shape, layout, is_piece=not one))
    views = not all(each.is_local for each in made) and gives_views(
        *(call.function, call.spec, whole.call.leaves, whole.call.shapes), whole.results
    )
    if views is None:
        return None
    return Proven(call, OfMoved(tuple(made), structure, views), tuple(results))


def _is_all(tokens: Moved, sources: Sequence[Source]) -> bool:
    """Whether a result is what is given, of which only the call knows whether it is a copy."""
    (run, *others) = tokens.runs
    return not others and (run.step, run.length) == (1, sources[run.source].size)


def layouts_of_tokens(
    whole: OfWholeSequence, held: Sequence[Held], length: int, group: ContextGroup
) -> list[Layout | None]:
    """Returns how the results of a call may be cut that moves tokens of wholes."""
    layouts: list[Layout | None] = [None] * len(whole.results)
    found = _tokens(whole, [each for each in held if each.layout is not None], held)
    if found is None:
        return layouts
    dim, every, _ = found
    sources = [Source(each.whole[dim], each.layout) for each in held]
    for place, tokens in enumerate(every):
        if tokens.is_one or not any(
            run.source >= 0 and sources[run.source].layout for run in tokens.runs
        ):
            continue
        even = sequence_of(dim, tokens.length, group.size)
        layouts[place] = target(tokens, dim, sources, length, group.size) if even.window else even
    return layouts


def _tokens(
    whole: OfWholeSequence, cut: Sequence[Held], held: Sequence[Held]
) -> tuple[int, list[Moved], Any] | None:
    """Returns the dim of tokens, those that results are made of, and their structure.

    Args:
        whole: the call.
        cut: what there is of the tensors that are cut, or could be.
        held: the same of all.
    """
    dims = {each.layout.dim for each in cut if each.layout and each.layout.outer == 1}
    if len(dims) != 1 or any(each.layout and each.layout.outer > 1 for each in cut):
        return None
    call = whole.call
    if has_backward_code(call.function):
        return None
    (dim,) = dims
    shapes = [each.whole for each in held]
    found = moved_tokens(call.function, call.spec, call.leaves, shapes, dim, whole.results)
    return None if found is None else (dim, *found)
