"""Attributes of leaves that both they and other code use.

All microbatches run their Python before any leaf runs for real. So code outside a leaf cannot see
what the leaf makes of its attributes in this step, and what it sets is seen by all later calls
alike. Where that would differ from one process, it is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, past_recording
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.stored import fakes_in, replaced
from smdistributed.modelparallel.torch.record.trace.tree import Entry
from smdistributed.modelparallel.torch.record.trace.unknown import Unknown
from smdistributed.modelparallel.torch.state.growth import Growth
from smdistributed.modelparallel.torch.state.holders import Holder, Owner
from smdistributed.modelparallel.torch.state.reach import OF_MODULES
from smdistributed.modelparallel.torch.state.snapshot import Difference, Snapshot, as_it_was
from smdistributed.modelparallel.torch.tensors.nested import same

_MISSING = object()


def _shared(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is changed by the module that has it, and read or set by code outside it, in the "
        "forward of a module that is split over partitions or in the step function. Put these "
        "modules on one partition, or keep that state inside one module (for a cache of "
        "Transformers: use_cache=False)."
    )


def _unknown(name: str) -> Unknown:
    """Returns what stands for something that a leaf will have made when it has run."""
    return Unknown(functools.partial(_shared, name))


def _changed(path: str, leaf: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path} is changed by code outside {leaf}, which can see it and has been called in this "
        "step already. The Python of a step runs before its modules do, so all calls would see the "
        "last value. Pass it as an argument, change it between two steps, or put the code that "
        "changes it and the module on one partition."
    )


def _has_fakes(content: Any) -> bool:
    """Whether an attribute has fakes, in a tuple too; what is in large lists would take long."""
    is_looked_at = isinstance(content, FakeTensor | tuple)
    return is_looked_at and any(True for _ in fakes_in(content))


def _attribute_set(place: tuple[nn.Module, str], before: Any) -> Difference:
    """Returns that an attribute of a module is another now."""
    module, name = place
    path = f"{type(module).__name__}.{name}"

    def put_back(module: nn.Module, content: Any) -> None:
        if content is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = content

    def read(module: nn.Module) -> Any:
        return vars(module).get(name, _MISSING)

    holder = Holder(module, Owner(module, name), path, read, put_back, before)
    return Difference(holder, read(module))


class Deed(NamedTuple):
    """What the call of a leaf does.

    Attributes:
        lines: what it computes, as text, which does not tell tensors of one shape apart.
        read: the tensors that it reads and has not made.
    """

    lines: list[str]
    read: list[torch.Tensor]

    def is_like(self, other: Deed) -> bool:
        """Whether two calls do the same with the same numbers."""
        return (
            self.lines == other.lines
            and len(self.read) == len(other.read)
            and all(map(_are_equal, self.read, other.read))
        )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if not _has_values(one) or not _has_values(other):
        return False
    with past_recording():
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be compared with another one."""
    is_real = not isinstance(tensor, FakeTensor) and not tensor.is_meta
    return is_real and tensor.layout is torch.strided


class LeafAttributes:
    """Watches the attributes of leaves while microbatches run their Python.

    Args:
        scene: the models.
        state: where the run is.
        deed: runs the call of a leaf on fakes again and returns what it does; None where that does
            not show.
    """

    def __init__(self, scene: Scene, state: RunState, deed: Callable[[Entry], Deed | None]) -> None:
        self._scene = scene
        self._state = state
        self._deed = deed
        self._running: nn.Module | None = None
        self._hooked: nn.Module | None = None
        self._set_by_hooks: dict[tuple[nn.Module, str], Any] | None = None
        #: Attributes of leaves that hooks which are lifted out have set, with what was there.
        self._own: dict[nn.Module, dict[tuple[nn.Module, str], Any]] = {}
        self._called: dict[nn.Module, dict[Entry, None]] = {}
        #: What code can see that backward passes will run, by the name of who gave it.
        self._later: list[tuple[str, Snapshot]] = []
        self._real: dict[tuple[nn.Module, str], Any] = {}
        self._set: set[tuple[nn.Module, str]] = set()
        self._hidden_growth: list[Growth] = []
        self._entries: dict[nn.Module, dict[str, Any]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watches; at the end every attribute is what it was."""
        former = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            leaf = self._scene.leaf_of.get(module)
            inside = self._state.leaf_depth or self._state.runs_for_real
            inside = inside or leaf in (self._running, self._hooked)
            if self._set_by_hooks is not None and name not in OF_MODULES:
                before = vars(module).get(name, _MISSING)
                self._set_by_hooks.setdefault((module, name), before)
            if leaf is not None and leaf is self._hooked:
                self._set.add((module, name))
            if leaf is not None and not inside and name not in OF_MODULES:
                self._check(leaf, module, name, value)
            former(module, name, value)

        # A run before the partition was known has left fakes, which it takes away itself.
        self._entries = {
            module: {
                name: value
                for name, value in vars(module).items()
                if name not in OF_MODULES and not _has_fakes(value)
            }
            for module in self._scene.leaf_of
        }
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
        for module, name in self._scene.hidden:
            self._hide(module, name, None)
        try:
            yield
        finally:
            nn.Module.__setattr__ = former  # type: ignore[method-assign]
            self._show(self._real)
            self._real = {}
            for growth in self._hidden_growth:
                growth.remove()

    def note_call(self, entry: Entry) -> None:
        """Takes note that a leaf is called in this step.

        Raises:
            UnsupportedError: what it can see has changed since its first call in this step.
        """
        leaf = entry.target
        if leaf not in self._called:
            self._called[leaf] = {}
            state = self._scene.states.get(leaf)
            if state is None or self._differences(leaf, state):
                self._scene.states[leaf] = self._scene.seen_by(leaf)
        else:
            self._refuse_difference(leaf)
        self._called[leaf][entry] = None
        self._check_lent(leaf)

    def _check_lent(self, leaf: nn.Module) -> None:
        """Makes sure that all calls of a leaf in this step are lent what is in the same places.

        Raises:
            UnsupportedError: one is not, and would find what is there in the end.
        """
        spots = self._scene.lent.get(leaf, {})
        for entry in self._called[leaf]:
            if missing := spots.keys() - {spot for spot, _ in entry.lent}:
                raise _changed(min(each.name for each in missing), self._scene.names[leaf])

    def _differences(
        self, leaf: nn.Module, state: Snapshot, apart_from: Collection[int] = ()
    ) -> list[Difference]:
        """Returns what a leaf would find as another than in a snapshot."""
        found = state.differences(apart_from)
        if not found or leaf not in self._scene.lent:
            return found
        lent: set[tuple[int, Any]] = set()
        for spot in self._scene.lent[leaf]:
            with contextlib.suppress(LookupError):
                lent.add(spot.place)
        return [each for each in found if not lent.issuperset(each.places)]

    def note_function(self, name: str, code: Callable[..., Any]) -> None:
        """Takes note that code outside of leaves gives a function that a backward pass will run."""
        self._later.append((name, Snapshot((), [code], moved=self._scene.own_tensors)))

    def check(self) -> None:
        """Makes sure that leaves will see what they would have seen when they were called.

        Raises:
            UnsupportedError: something has changed since.
        """
        for leaf, entries in self._called.items():
            self._refuse_difference(leaf)
            self.refuse_own(entries, self._own.get(leaf, {}))
            # Regions of code between modules find them as they were called.
            self.refuse_switch(each for each in entries if each.checkpoints)
        for name, state in self._later:
            if found := state.differences():
                raise _changed(found[0].holder.path, f"the backward pass of {name}")
        for module, attributes in self._entries.items():
            for name, value in attributes.items():
                if vars(module).get(name, _MISSING) is not value and (module, name) not in {
                    *self._set,
                    *self._real,
                }:
                    raise _changed(f"{type(module).__name__}.{name}", "its module")

    def _refuse_difference(self, leaf: nn.Module) -> None:
        state = self._scene.states[leaf]
        # What it has put into containers of its own, it has put there itself.
        own = {id(each.obj) for entry in self._called[leaf] for each in entry.left}
        if self.refuse_difference(self._called[leaf], state, own):
            self._scene.states[leaf] = self._scene.seen_by(leaf)

    def refuse_difference(
        self, entries: Iterable[Entry], state: Snapshot, apart_from: Collection[int] = ()
    ) -> bool:
        """Raises if what a leaf can see has changed since a snapshot, and matters to it.

        Args:
            entries: calls of the leaf.
            state: what it could see.
            apart_from: identities of what it changes itself.

        Returns:
            whether something has changed that does not matter.

        Raises:
            UnsupportedError: something has changed that does.
        """
        entries = list(entries)
        found = self._differences(entries[0].target, state, apart_from)
        if not found:
            return False
        self._refuse_if_seen(entries, found)
        return True

    def refuse_switch(self, entries: Iterable[Entry]) -> None:
        """Raises if modules train that did not when they were called, or the other way round.

        Args:
            entries: calls that the backward pass makes again, as modules are switched then.

        Raises:
            UnsupportedError: they do.
        """
        for entry in entries:
            if entry.flags != self._scene.flags_of(entry.target):
                raise UnsupportedError(
                    f"{entry.name} is called in a checkpointed call or has one in it, and is "
                    "switched by train() or eval() in the same step: the backward pass, which "
                    "calls it again, would find it switched otherwise. Switch it between two calls "
                    "of step functions."
                )

    def refuse_own(
        self, entries: Iterable[Entry], places: Mapping[tuple[nn.Module, str], Any]
    ) -> None:
        """Raises if what hooks have set on modules of a leaf matters to it.

        Args:
            entries: calls of the leaf.
            places: what they have set, with what was there before.

        Raises:
            UnsupportedError: it does.
        """
        for entry in entries:
            new = {place: places[place] for place in places.keys() - entry.unseen}
            self._refuse_if_seen([entry], [_attribute_set(*each) for each in new.items()])
            entry.unseen.update(new)

    def _refuse_if_seen(self, entries: Iterable[Entry], found: Sequence[Difference]) -> None:
        if not found:
            return
        for entry in entries:
            now = before = None
            # The leaf itself may fail, one way or the other. What its backward pass does with
            # what it sees shows nowhere.
            with contextlib.suppress(Exception):
                if not entry.runs_backward:
                    now = self._deed(entry)
                    with as_it_was(found):
                        before = self._deed(entry)
            if now is None or before is None or not now.is_like(before):
                raise _changed(found[0].holder.path, self._scene.names[entry.target] or "the model")

    def hide(self, module: nn.Module, name: str, content: Any) -> None:
        """Hides an attribute that a leaf changes, and has changed now, but for the fakes in it.

        Args:
            module: that has it.
            name: of the attribute.
            content: what the leaf has left there: a fake, or a tuple around some; None if it is
                something else.
        """
        self._scene.hidden.add((module, name))
        self._hide(module, name, content)

    def hide_growth(self, grown: Sequence[Growth]) -> None:
        """Hides what leaves have added to containers in a microbatch that is over."""
        for growth in reversed(grown):
            has_tensors = any(isinstance(each, torch.Tensor) for each in growth.added.values())
            if has_tensors and not growth.is_own:
                self._hidden_growth.append(
                    growth.replaced(
                        lambda: Unknown(
                            functools.partial(_shared, "what a hook or a module has stored")
                        )
                    )
                )
            else:
                growth.remove()

    @contextlib.contextmanager
    def shown_to(self, leaf: nn.Module) -> Iterator[None]:
        """Lets a leaf, or hooks in it, see its attributes and set them."""
        former, self._running = self._running, leaf
        own = {
            place: value
            for place, value in self._real.items()
            if self._scene.leaf_of.get(place[0]) is leaf
        }
        try:
            with self._shown(own):
                yield
        finally:
            self._running = former

    @contextlib.contextmanager
    def set_by_hooks(self, leaf: nn.Module | None) -> Iterator[dict[tuple[nn.Module, str], Any]]:
        """Lets hooks that are lifted out of a leaf set its attributes, for all.

        Args:
            leaf: None for a module that is not known to be in one yet.

        Yields:
            what they have set, with what was there before; filled.
        """
        places: dict[tuple[nn.Module, str], Any] = {}
        former = self._hooked, self._set_by_hooks
        self._hooked, self._set_by_hooks = leaf, places
        try:
            yield places
        finally:
            self._hooked, self._set_by_hooks = former

    def note_set(self, leaf: nn.Module, places: Mapping[tuple[nn.Module, str], Any]) -> None:
        """Takes note of what forward hooks have set: it may make no difference to a leaf.

        Args:
            leaf: which they are lifted out of.
            places: the attributes, with what was there before.
        """
        self._own[leaf] = {**places, **self._own.get(leaf, {})}

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Lets all leaves see their attributes."""
        return self._shown(dict(self._real))

    @contextlib.contextmanager
    def _shown(self, own: dict[tuple[nn.Module, str], Any]) -> Iterator[None]:
        hidden = {place: vars(place[0]).get(place[1], _MISSING) for place in own}
        self._show(own)
        try:
            yield
        finally:
            self._show(hidden)

    def _hide(self, module: nn.Module, name: str, content: Any) -> None:
        entries = vars(module)
        self._real.setdefault((module, name), entries.get(name, _MISSING))
        path = f"{type(module).__name__}.{name}"

        def shown(part: Any) -> Any:
            return part if isinstance(part, FakeTensor) else _unknown(path)

        entries[name] = replaced(content, shown)

    @staticmethod
    def _show(values: dict[tuple[nn.Module, str], Any]) -> None:
        for (module, name), value in values.items():
            if value is _MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value

    def _check(self, leaf: nn.Module, module: nn.Module, name: str, value: Any) -> None:
        if any(each.starts_at(vars(module), name) for each in self._scene.lent.get(leaf, ())):
            self._set.add((module, name))
            return
        text = f"{self._scene.names[module] or type(module).__name__}.{name}"
        if (module, name) in self._real:
            raise _shared(text)
        if isinstance(value, FakeTensor) and self._scene.slots.get(id(value)) is None:
            raise UnsupportedError(
                f"{text} is set to a tensor of the step by code outside its module, which is "
                "executed as a whole. Pass the tensor as an argument, or put both modules on one "
                "partition."
            )
        if leaf in self._called and not same(
            vars(module).get(name, _MISSING), value, lambda one, other: one is other
        ):
            raise _changed(text, "its module")
        self._set.add((module, name))
