"""What a module uses that it is not given, and what it shows of that.

A layer reads features that a script keeps in an attribute, reaches the buffer of another layer past
the tree of modules, or returns what it keeps itself. So what a call has read and written is looked
through: for parameters and buffers of others (*reached*), for tensors of the step (*borrowed*,
which are lent to it), and for its own memory in what it returns (*shown*, *kept*).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.leaves.lending import Done, lent_to, tensors_left
from smdistributed.modelparallel.torch.record.leaves.runs import LeafRun
from smdistributed.modelparallel.torch.record.leaves.spans import Span
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.trace.tree import Entry
from smdistributed.modelparallel.torch.state.snapshot import Change
from smdistributed.modelparallel.torch.tensors.nested import placeholders, tensors_in

#: Where modules have their parameters and buffers.
_SLOTS = ("_parameters", "_buffers")


class Reaching:
    """Notes in entries what their calls have used and shown.

    Args:
        context: of the recorder.
        now: the microbatch.
    """

    def __init__(self, context: Context, now: Microbatch) -> None:
        self._scene = context.scene
        self._calls = context.calls
        self._now = now

    def note_run(self, entry: Entry, run: LeafRun) -> None:
        """Notes what a leaf has used in the run that its entry is made of."""
        entry.borrowed = self._borrowed(entry, run.borrowed)
        self._tell_found(entry, run.made, {id(each) for each in run.borrowed})
        self._tell_reached(entry, run.borrowed, run.done.written)
        self._lend(entry, run.done)

    def note_call(self, span: Span, inner: Iterable[Span], changes: Iterable[Change]) -> None:
        """Notes which parameters and buffers of others a module uses that may become a leaf.

        Args:
            span: its call.
            inner: the calls in it.
            changes: of Python state, by it.
        """
        now, entry = self._now, span.entry
        assert now.new is not None
        now.slots_set.update(_slots_set(changes))
        below = [each for each in inner if each.parent is span]
        own = set(range(span.start, span.end)).difference(*(range(e.start, e.end) for e in below))
        calls = [each for each in map(now.new.__getitem__, sorted(own)) if not each.is_of_hook]
        read = [tensor for each in calls for tensor in tensors_given(each)]
        self._tell_reached(entry, read, [tensor for each in calls for tensor in each.changed])
        entry.checkpoints = _have_regions([*calls, *(each.entry for each in below)], entry)
        if entry.reached:
            profile = self._calls.profile
            found = profile.reached.get(span.module, frozenset())
            profile.reached[span.module] = found | entry.reached
        inside = set(entry.modules)
        for each in below:
            entry.checkpoints |= each.entry.checkpoints
            entry.reached |= {slot for slot in each.entry.reached if slot[0] not in inside}
            for module, names in each.entry.stateful.items():
                if module not in inside:
                    entry.stateful.setdefault(module, set()).update(names)

    def note_leaf(self, span: Span, log: Sequence[Entry]) -> None:
        """Notes what a module that has turned out to be a leaf has read that it is not given.

        Args:
            span: its call.
            log: the entries of the microbatch.
        """
        inside = [each for each in log[span.start : span.end] if not each.is_of_hook]
        made = {id(tensor) for entry in inside for _, tensor in entry.outputs}
        read = [each for entry in inside for each in tensors_given(entry)]
        before = {id(tensor) for entry in log[: span.start] for _, tensor in entry.outputs}
        before.update(map(id, self._now.trace.inputs))
        left = tensors_left(span.entry.result, span.entry.changes)
        read += [each for each in left if id(each) in before]
        span.entry.borrowed = self._borrowed(span.entry, read, made)
        self._tell_found(span.entry, inside, before)
        written = [tensor for entry in inside for tensor in entry.changed]
        has_regions = _have_regions(inside, span.entry)
        done = Done(span.snapshot, span.entry.changes, span.entry.left, written, has_regions)
        self._lend(span.entry, done, pins=False)

    def tell_shown(self, entry: Entry, changes: Sequence[Change]) -> None:
        """Notes what the results of a call show of parameters, buffers and attributes.

        Args:
            entry: of the call, with its results.
            changes: of Python state, by it.
        """
        slots_set = {**self._now.slots_set, **_slots_set(changes)}
        for path, tensor in entry.outputs:
            slots = self._slots_in(tensor, slots_set)
            if slots or id(tensor) in self._now.stood_in:
                entry.shown[path] = slots
        left = _memory_in(changes)
        entry.kept = frozenset(path for path, each in entry.outputs if _lies_in(each, left))

    def _borrowed(
        self, entry: Entry, read: Iterable[torch.Tensor], made: Collection[int] = ()
    ) -> list[torch.Tensor]:
        """Returns what a leaf has read that it is not given, and that no parameter or buffer is.

        Args:
            entry: of its call.
            read: what it has read.
            made: identities of what it has made itself.
        """
        if entry.held:
            return []  # by way of objects with state, which are looked after
        given = set(map(id, tensors_given(entry)))
        known = given.union(made, self._scene.slots)
        return [each for each in read if isinstance(each, FakeTensor) and id(each) not in known]

    def _tell_found(self, entry: Entry, inside: Iterable[Entry], before: Collection[int]) -> None:
        """Notes in an entry what a leaf finds in objects and gradients would have to go back to.

        Args:
            entry: of its call.
            inside: the calls in it.
            before: identities of what was made before it.
        """
        if not entry.held:
            return
        given = set(map(id, tensors_given(entry)))
        used = [*(tensor for _, tensor in entry.outputs)]
        for call in inside:
            if any(tensor.requires_grad for _, tensor in call.outputs):
                used += tensors_given(call)
        entry.found = [
            each
            for each in used
            if each.requires_grad and id(each) in before and id(each) not in given
        ]

    def _tell_reached(
        self, entry: Entry, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> None:
        """Notes in an entry which parameters and buffers of others a leaf uses, and is not given.

        Args:
            entry: of its call.
            read: what it has read.
            written: what it has written to.
        """
        inside = set(entry.modules)
        given = {slot for each in tensors_given(entry) for slot in self._scene.slots_in(each)}

        def of_others(tensors: Iterable[torch.Tensor]) -> set[Slot]:
            found = [self._slots_in(each, self._now.slots_set) for each in tensors]
            others = [slots for slots in found if inside.isdisjoint(dict(slots))]
            return set[Slot]().union(*others) - given

        changed = of_others(written)
        for module, name in changed:
            entry.stateful.setdefault(module, set()).add(name)
        entry.reached = frozenset(changed | of_others(read))

    def _slots_in(
        self, tensor: torch.Tensor, slots_set: Mapping[int, frozenset[Slot]]
    ) -> frozenset[Slot]:
        """Returns the parameters and buffers in whose memory a tensor lies, or has been put."""
        return self._scene.slots_in(tensor).union(
            *(slots_set.get(memory, ()) for memory in _memory_of(tensor))
        )

    def _lend(self, entry: Entry, done: Done, *, pins: bool = True) -> None:
        """Lends a leaf what it has read and is not given, and says so to its other calls.

        Args:
            entry: of its call.
            done: what it did.
            pins: what other calls find is known here.
        """
        spots = self._scene.lent.get(entry.target, {})
        entry.lent = lent_to(entry, entry.borrowed, spots if pins else (), done)
        if entry.lent:
            known = self._scene.lent.setdefault(entry.target, {})
            known.update((spot, None) for spot, _ in entry.lent)


def tensors_given(entry: Entry) -> Iterator[torch.Tensor]:
    """Yields the tensors among the arguments of a call."""
    return placeholders((entry.args, entry.kwargs), torch.Tensor)


def _have_regions(inside: Iterable[Entry], entry: Entry) -> bool:
    """Returns whether calls in that of a module are checkpointed by themselves."""
    return any(each.region not in (None, entry.region) for each in inside)


def _slots_set(changes: Iterable[Change]) -> dict[int, frozenset[Slot]]:
    """Returns the memory of tensors that a leaf has made its parameters or buffers, with these."""
    found: dict[int, frozenset[Slot]] = {}
    for change in changes:
        if change.owner and change.owner.attribute in _SLOTS:
            module, attribute = change.owner
            slots = frozenset((module, name) for name in getattr(module, attribute))
            for memory in _memory_in([change]):
                found[memory] = found.get(memory, frozenset()) | slots
    return found


def _memory_in(changes: Iterable[Change]) -> set[int]:
    """Returns the memory of tensors that a leaf has put somewhere, such as attributes."""
    tensors = (tensor for change in changes for tensor in tensors_in(change.now))
    return set[int]().union(*map(_memory_of, tensors))


def _lies_in(tensor: torch.Tensor, memory: Collection[int]) -> bool:
    return not _memory_of(tensor).isdisjoint(memory)


def _memory_of(tensor: torch.Tensor) -> set[int]:
    """Returns the memory of a tensor, as far as there is one."""
    return {storage_of(tensor)} if tensor.layout is torch.strided else set()
