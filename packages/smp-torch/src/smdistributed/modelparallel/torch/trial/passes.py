"""Trying out both passes of a module on fakes; see ``turns`` for what that is to show."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.state.growth import Growth
from smdistributed.modelparallel.torch.state.holders import MISSING
from smdistributed.modelparallel.torch.state.snapshot import Change, Snapshot
from smdistributed.modelparallel.torch.tensors.nested import tensors_in
from smdistributed.modelparallel.torch.tensors.writes import writes_of
from smdistributed.modelparallel.torch.trial.turns import KeptTensors, differentiate


class Run(Protocol):
    """What a module did on fakes."""

    @property
    def changes(self) -> Sequence[Change]:
        """The Python state that it changed, put back already."""

    @property
    def grown(self) -> Sequence[Growth]:
        """What it added to containers that others see: not yet taken out."""

    @property
    def lines(self) -> Sequence[str]:
        """What it did, as text."""

    @property
    def read(self) -> Sequence[Any]:
        """What it read that no recorded call made."""


class Course(Protocol):
    """How far a run on fakes is.

    Attributes:
        num_regions: how many checkpointed calls were made.
        gradient_reads: how often a gradient was looked at.
    """

    num_regions: int
    gradient_reads: int

    def pausing(self) -> contextlib.AbstractContextManager[None]:
        """Records nothing meanwhile."""


class PassTrial:
    """A forward pass, a backward pass, and the next forward pass of a module. Leaves no trace.

    Args:
        course: of the run.
        module: it keeps state, or its backward pass runs code.
        arguments: of its call.
        call: makes it.
        run: makes it, and tells what it did.
        apart: inside, the module runs as if nobody had asked for it.
        hooks: on the gradients of its parameters, with these.

    Attributes:
        in_turn: why no other microbatch may run the leaf between its two passes; "" if one may.
        changes: the Python state that the backward pass changes.
        sees_backward: the next forward pass may see what the backward pass has changed.
        rewrites: the next forward pass may write to what this one was given, where autograd does
            not see it.
    """

    def __init__(
        self,
        course: Course,
        module: nn.Module,
        arguments: Any,
        call: Callable[[], Any],
        run: Callable[[Callable[[], Any]], Run],
        apart: Callable[[], contextlib.AbstractContextManager[Any]],
        hooks: Sequence[tuple[torch.Tensor, Callable[[torch.Tensor], Any]]],
    ) -> None:
        self._course = course
        self._module = module
        self._arguments = arguments
        self._call = call
        self._run = run
        self._apart = apart
        self._hooks = hooks
        self.in_turn = ""
        self.changes: list[Change] = []
        self.sees_backward = False
        self.rewrites = False
        #: What the next forward pass changes.
        self._next: Sequence[Change] = []

    def run(self, *, keeps_state: bool, runs_code: bool) -> None:
        """Runs the passes.

        Args:
            keeps_state: the forward pass changes something besides statistics.
            runs_code: the backward pass runs hooks, or functions that are written in Python.
        """
        before = self._snapshot()
        try:
            # Recurrent layers of cuDNN's have no backward pass for fakes.
            with torch.backends.cudnn.flags(enabled=False):
                self.in_turn = self._why(before, keeps_state=keeps_state, runs_code=runs_code)
        except Exception as error:
            # What it does forward has been recorded; a backward pass may not be made for fakes.
            self.in_turn = f"its passes cannot be tried out ({type(error).__name__}: {error})"
            self.rewrites = self.sees_backward = keeps_state
        finally:
            before.note_changes()
            for growth in before.put_back():
                growth.remove()

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._module.modules(), [hook for _, hook in self._hooks])

    def _why(self, before: Snapshot, *, keeps_state: bool, runs_code: bool) -> str:
        course = self._course
        reads, regions = course.gradient_reads, course.num_regions
        with self._apart():
            result = self._call()
        computes_again = course.num_regions > regions
        before.note_changes()
        writes_forward = before.has_written
        with course.pausing():
            kept = KeptTensors(self._arguments, result)
            between = self._snapshot()
            ran_code, writes_back = self._differentiate(result)
            self.changes = between.note_changes()
            writes_back |= between.has_written
        reads_changes = self._reads_what_has_changed(between)
        reads_gradients = course.gradient_reads > reads
        self.sees_backward = reads_gradients or writes_back or reads_changes
        if reads_gradients:
            return "its forward pass reads gradients, which the former microbatch has added to"
        if writes_forward:
            # Autograd keeps what stands for it on fakes, which nobody writes to.
            return "its forward pass writes to a tensor that is no parameter and no buffer"
        if writes_back:
            return "its backward pass writes to a tensor"
        if reads_changes:
            return "its backward pass changes what its next forward pass reads"
        if keeps_state and (runs_code or ran_code or computes_again):
            return "its backward pass runs code, which may see what a forward pass has changed"
        if kept.are_written():
            return "its next forward pass writes to what its backward pass computes with"
        # How much there is in a container that grows is such a value too.
        if any(each.added is not None or not _is_of_tensors(each.now) for each in self._next):
            return "its forward pass counts, or changes other values that it may decide by"
        return ""

    def _differentiate(self, result: Any) -> tuple[bool, bool]:
        """Runs the backward pass.

        Returns:
            whether it runs code of the user's, and whether it writes to parameters or buffers.
        """
        own = [
            (each, writes_of(each))
            for each in (*self._module.parameters(), *self._module.buffers())
        ]
        ran_code = differentiate(self._module, self._arguments, result)
        for parameter, hook in self._hooks:
            hook(torch.zeros_like(parameter))
        return ran_code, any(writes_of(each) != number for each, number in own)

    def _reads_what_has_changed(self, between: Snapshot) -> bool:
        """Runs the next forward pass, with what the backward pass has changed and without."""
        given = [(each, writes_of(each)) for each in tensors_in(self._arguments)]
        behind = self._run(self._call)
        self._next = behind.changes
        self.rewrites = any(
            writes_of(each) != state and version_of(each) == state[0] for each, state in given
        )
        for growth in behind.grown:
            growth.remove()
        if not self.changes:
            return False
        with self._course.pausing():
            for growth in between.put_back():
                growth.remove()
        ahead = self._run(self._call)
        for growth in ahead.grown:
            growth.remove()
        return (behind.lines, behind.read) != (ahead.lines, ahead.read)


def _is_of_tensors(obj: Any, depth: int = 4) -> bool:
    """Whether there are tensors in an object, and containers of tensors, and no other values."""
    if obj is None or obj is MISSING or isinstance(obj, torch.Tensor):
        return True
    if isinstance(obj, Mapping):
        obj = tuple(obj.values())
    is_container = depth > 0 and isinstance(obj, list | tuple | set | collections.deque)
    return is_container and all(_is_of_tensors(each, depth - 1) for each in obj)
