"""Leaves that are given an object with state: do they find in it what they would in one process?

Ranks have copies of such an object (``state/carried.py``). So a leaf is called on the copy of its
rank, too: where the calls that it makes there are not the same, of the very same tensors, it
depends on what another rank has left in the object.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.leaves.repetition import Repetition
from smdistributed.modelparallel.torch.record.leaves.runs import LeafRun, depends_on_others
from smdistributed.modelparallel.torch.record.leaves.spans import Span
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.trace.tree import Entry
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.tensors.nested import fill, tensors_in


class HeldObjects:
    """Calls leaves on the copies of their ranks.

    Args:
        context: of the recorder.
        now: the microbatch.
    """

    def __init__(self, context: Context, now: Microbatch) -> None:
        self._context = context
        self._now = now

    def check(self, span: Span, inside: Sequence[Entry]) -> None:
        """Makes sure that a leaf does not depend on what another rank left in an object.

        Args:
            span: the leaf.
            inside: what it called when it was met.
        """
        entry = span.entry
        try:
            self._check(span, inside)
        except UnsupportedError:
            assert self._now.values is not None
            for carried, _ in entry.held:  # which says more
                self._now.values.copies.check_left(entry, carried)
            raise

    def _check(self, span: Span, inside: Sequence[Entry]) -> None:
        now, entry = self._now, span.entry
        assert now.values is not None
        # The run that made the span has calls of its own.
        call = functools.partial(now.call_inside, span.call, span.module)
        templates = entry.args, entry.kwargs
        if self._is_repeated(span, inside, call):
            return
        on_copies = now.leaf_runs.run_on_copies(now.values, entry.target, call, templates)
        if on_copies.lines != now.leaf_runs.lines_of(now.values, inside, span.returned):
            # What it called between modules may stand there in other words than in a leaf.
            before = dict(span.before)
            arguments = fill((entry.args, entry.kwargs), Carried, before.__getitem__)
            with self._context.calls.uncounted():
                lines = now.leaf_runs.run(
                    now.values, entry.target, lambda: call(*arguments[0], **arguments[1])
                ).lines
            if lines != on_copies.lines:
                raise depends_on_others(entry.name, templates)

    def _is_repeated(self, span: Span, inside: Sequence[Entry], call: Callable[..., Any]) -> bool:
        """Whether a leaf makes the same calls on its rank's copies."""
        now, entry = self._now, span.entry
        repetition = Repetition(inside)
        if repetition.differs:
            return False
        assert now.values is not None
        now.repetition = repetition
        try:
            run = now.leaf_runs.run_on_copies(
                now.values, entry.target, call, (entry.args, entry.kwargs)
            )
        finally:
            now.repetition = None
        returned = [now.fake(each) for each in tensors_in(run.result)]
        return (
            repetition.is_over
            and not repetition.differs
            and len(returned) == len(span.returned)
            and all(map(operator.is_, returned, span.returned))
        )

    def run_on_copies(self, entry: Entry, call: Callable[..., Any]) -> LeafRun | None:
        """Returns what a leaf does on the copies of its rank; None if it is given no object."""
        now = self._now
        if not entry.held:
            return None
        assert now.values is not None
        return now.leaf_runs.run_on_copies(
            now.values, entry.target, call, (entry.args, entry.kwargs)
        )

    def compare(self, entry: Entry, run: LeafRun, on_copies: LeafRun | None) -> None:
        """Compares what a leaf has done with what it has done on copies.

        Raises:
            UnsupportedError: they differ.
        """
        if on_copies is None:
            return
        if on_copies.lines != run.lines:
            raise depends_on_others(entry.name, (entry.args, entry.kwargs))
