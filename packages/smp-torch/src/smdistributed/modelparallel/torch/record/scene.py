"""What a run on fakes can meet of the models: names, fakes, and what belongs to which leaf."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.calls.forward_hooks import ForwardHooks, Signature
from smdistributed.modelparallel.torch.record.calls.lifted_hooks import (
    LiftedHooks,
    has_gradient_hooks,
)
from smdistributed.modelparallel.torch.record.calls.refusals import switched_how
from smdistributed.modelparallel.torch.record.fakes import FakeModel, Slot
from smdistributed.modelparallel.torch.record.ir import Frozen, Leaf
from smdistributed.modelparallel.torch.record.leaves.gradient_hooks import GradientHook
from smdistributed.modelparallel.torch.record.leaves.surroundings import Surroundings
from smdistributed.modelparallel.torch.record.trace.stored import fakes_in
from smdistributed.modelparallel.torch.record.trace.taps import has_hooks_of_packages
from smdistributed.modelparallel.torch.record.trace.tree import Entry, Seen
from smdistributed.modelparallel.torch.state.caches import FunctionCaches
from smdistributed.modelparallel.torch.state.reach import OF_MODULES
from smdistributed.modelparallel.torch.state.snapshot import Change, Place, Snapshot
from smdistributed.modelparallel.torch.state.spots import Spot

_TRAINING = operator.attrgetter("training")


class Scene:
    """All models that a step function may call; good until one of them changes its structure.

    Args:
        models: the models.
        leaves: their modules that sit whole on one partition.
        unplaced: the models that have no partition yet.
        code: that calls them.

    Attributes:
        names: module -> dotted name, the root's being "".
        draw_names: module -> its name in the keys of random numbers.
        roots: the user's models.
        slots: id of a fake -> its model, and the slot where it is.
        storages: the memory of all fakes, with the slots of those that lie there.
        inner: leaf -> the modules in it.
        holding: leaf -> of the parameters and buffers in it the dicts, the names there, the fakes.
        leaf_of: module -> the outermost leaf that it is in.
        on_one: the parameters, and the buffers of leaves, which lie on one rank alone.
        open: the modules of models that have no partition yet.
        hidden: attributes of modules that leaves change.
        lifted: hooks that are lifted out of modules.
        lent: leaf -> where its calls find tensors that are lent to them.
        states: leaf -> the Python state that it can see, as it was when it was called.
        caches: of functions, which may keep fakes.
        frozen: the parameters, by the ids of fakes, that the code of a microbatch has require no
            gradient for what comes then.
    """

    def __init__(
        self,
        models: Sequence[FakeModel],
        leaves: Mapping[nn.Module, Leaf],
        unplaced: Sequence[FakeModel] = (),
        code: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self._code = code
        self._reach: dict[nn.Module | None, set[Place]] = {}
        self.models = models
        self.leaves = leaves
        self.open = {module for model in unplaced for module in model.names}
        self.hidden: set[tuple[nn.Module, str]] = set()
        self.lent: dict[nn.Module, dict[Spot, None]] = {}
        self.states: dict[nn.Module, Snapshot] = {}
        self.caches = FunctionCaches()
        self.frozen: dict[int, Slot] = {}
        self.names = {module: name for model in models for module, name in model.names.items()}
        self.lifted = LiftedHooks(self.names, {model.model for model in models})
        self.draw_names = {
            module: model.draw_name(module) for model in models for module in model.names
        }
        self.roots = {model.model for model in models}
        self.slots: dict[int, tuple[FakeModel, Slot]] = {
            id(fake): (model, slot)
            for model in models
            for slot, fake in reversed(model.slots.items())
        }
        self.storages: dict[int, frozenset[Slot]] = {}
        for model in models:
            for slot, fake in model.slots.items():
                memory = storage_of(fake)
                self.storages[memory] = self.storages.get(memory, frozenset()) | {slot}
        self._real: dict[int, torch.Tensor] = {}
        self.inner = {leaf: tuple(leaf.modules()) for leaf in leaves}
        self._fakes = {slot: fake for model in models for slot, fake in model.slots.items()}
        places = {leaf: self._held_by(self.inner[leaf]) for leaf in leaves}
        # In columns: each call of a leaf goes over them.
        self.holding = {leaf: _columns(found) for leaf, found in places.items()}
        self.leaf_of: dict[nn.Module, nn.Module] = {}
        for leaf in leaves:  # outer modules come first
            for module in self.inner[leaf]:
                self.leaf_of.setdefault(module, leaf)
        self.on_one = {
            slot
            for slot, fake in self._fakes.items()
            if isinstance(fake, nn.Parameter) or slot[0] in self.leaf_of
        }

    def forward_hooks_of(self, module: nn.Module) -> ForwardHooks:
        """Returns the forward hooks of the model that a module is part of."""
        return next(each.forward_hooks for each in self.models if module in each.names)

    def forward_hooks_in(self, modules: Sequence[nn.Module]) -> Signature:
        """Returns which forward hooks are on some modules of a leaf."""
        return self.forward_hooks_of(modules[0]).signature(modules)

    def seen_around(self, module: nn.Module) -> Surroundings:
        """Returns what a module goes by, and all that may be called with it on one rank."""
        model = next(each for each in self.models if module in each.names)
        outermost = module
        if module not in self.roots:
            outermost = model.model.get_submodule(self.names[module].partition(".")[0])
        hooks = [each.stand_in for each in model.forward_hooks.on(outermost.modules())]
        return Surroundings(outermost, hooks)

    def forget_reach(self) -> None:
        """Takes note that what modules, and code outside of them, can reach is to be found anew."""
        self._reach = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the fakes into the models, and the real tensors back afterwards."""
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.in_place())
            self._real = {key: fake for model in self.models for key, fake in model.real.items()}
            self.frozen = {}
            try:
                yield
            finally:
                self._real = {}

    @contextlib.contextmanager
    def real_in_place(self) -> Iterator[None]:
        """Puts the real tensors back for a while."""
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.real_in_place())
            yield

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the fake of a model's own tensor, which code may hold by another way."""
        return self._real.get(id(tensor))

    def is_most_of_a_model(self, module: nn.Module) -> bool:
        """Whether a module has more than half of a model: kept whole it would leave ranks idle."""
        model = next(each.model for each in self.models if module in each.names)
        return module is model or 2 * _num_parameters(module) > _num_parameters(model)

    def runs_with_values(self, module: nn.Module) -> bool:
        """Whether a module is whole, or will be: its code may do with numbers what it likes."""
        if module in self.leaves:
            return True
        return module in self.open and not self.is_most_of_a_model(module)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields the fakes of all buffers."""
        for model in self.models:
            for (module, name), fake in model.slots.items():
                if name in module._buffers:
                    yield fake

    @property
    def own_tensors(self) -> Container[int]:
        """The identities of the models' own parameters and buffers."""
        return self._real.keys()

    def real_of(self, module: nn.Module, name: str) -> Any:
        """Returns a parameter or buffer for which a fake stands at present."""
        for model in self.models:
            if (module, name) in model.behind:
                return model.behind[module, name]
        return getattr(module, name)

    def inner_of(self, leaf: nn.Module) -> tuple[nn.Module, ...]:
        """Returns a leaf and the modules in it, also one that is not known to be a leaf yet."""
        return self.inner.get(leaf) or tuple(leaf.modules())

    def seen_by(self, leaf: nn.Module) -> Snapshot:
        """Returns the Python state that a leaf can see, the hooks of its parameters included."""
        hooks = [hook.function for hook in self.hooks_in(leaf)]
        return self.snapshot(leaf, hooks, moved=self.own_tensors)

    def snapshot(
        self,
        leaf: nn.Module,
        code: Iterable[Callable[..., Any]] = (),
        moved: Container[int] = (),
    ) -> Snapshot:
        """Returns the Python state that a leaf can reach; hooks that are lifted out are not its."""
        hooks = (hook.stand_in for model in self.models for hook in model.forward_hooks.lifted())
        with self.lifted.taken_off(self.lifted.modules):
            return Snapshot(leaf.modules(), code, hooks, moved)

    def hooks_in(self, leaf: nn.Module) -> list[GradientHook]:
        """Returns the hooks on the gradients of the parameters in a leaf."""
        own = set(map(id, self.real_parameters(leaf)))
        found = (hook for model in self.models for hook in model.hooks.found)
        return [hook for hook in found if id(hook.parameter) in own]

    def real_parameters(self, leaf: nn.Module) -> list[torch.Tensor]:
        """Returns the parameters in a leaf for which fakes stand at present."""
        return [
            self.real_of(inner, name)
            for inner in leaf.modules()
            for name, fake in inner._parameters.items()
            if fake is not None
        ]

    def flags_of(self, leaf: nn.Module) -> tuple[bool, ...]:
        """Returns whether each module in a leaf trains."""
        return tuple(map(_TRAINING, self.inner_of(leaf)))

    def freeze(self, fake: torch.Tensor, flag: bool) -> None:
        """Has a parameter require no gradient in the calls that follow, or as outside the step.

        Raises:
            UnsupportedError: it would require one that requires none outside.
        """
        _, slot = self.slots[id(fake)]
        requires_grad = self.real_of(*slot).requires_grad
        if not flag and not requires_grad:
            raise switched_how(*slot, "from False to True")
        fake.requires_grad_(requires_grad and not flag)
        if requires_grad and flag:
            self.frozen[id(fake)] = slot
        else:
            self.frozen.pop(id(fake), None)

    def frozen_in(self, leaf: nn.Module) -> Frozen:
        """Returns the parameters in a leaf that require no gradient now, and do outside."""
        return tuple(
            (module, name)
            for module in (self.inner_of(leaf) if self.frozen else ())
            for name, fake in module._parameters.items()
            if fake is not None and id(fake) in self.frozen
        )

    def slots_in(self, tensor: torch.Tensor) -> frozenset[Slot]:
        """Returns the parameters and buffers in whose memory a tensor lies."""
        if tensor.layout is not torch.strided:
            return frozenset()
        return self.storages.get(storage_of(tensor), frozenset())

    def slot_name(self, slot: Slot) -> str:
        """Returns the dotted name of a parameter or buffer."""
        return next(model for model in self.models if slot in model.slots).slot_name(slot)

    def check_hooks(self, module: nn.Module) -> None:
        """Makes sure that a split module has no hooks of its backward pass, which it has not.

        Raises:
            UnsupportedError: it has.
        """
        if module in self.lifted.modules:
            return
        if has_gradient_hooks(module) or _has_global_backward_hooks():
            raise UnsupportedError(
                f"{self.names[module] or 'the model'} is split over partitions and has hooks of "
                "its backward pass (register_full_backward_hook, register_full_backward_pre_hook): "
                "no process runs it. Put hooks on modules that stay whole, or the module on one "
                "partition."
            )

    def has_its_own(self, module: nn.Module) -> bool:
        """Whether a module, and those in it, have their own parameters and buffers at present.

        Code may call them with others, by ``torch.func.functional_call``.
        """
        if module in self.holding:
            tensors, names, fakes = self.holding[module]
        else:
            tensors, names, fakes = _columns(self._held_by(self.inner_of(module)))
        return all(map(operator.is_, map(dict.get, tensors, names), fakes))

    def _held_by(
        self, modules: Iterable[nn.Module]
    ) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Returns of parameters and buffers of modules the dicts, the names there, the fakes."""
        return [
            (tensors, name, self._fakes[module, name])
            for module in modules
            for tensors in (module._parameters, module._buffers)
            for name in tensors
            if (module, name) in self._fakes
        ]

    def settle(self, entry: Entry) -> None:
        """Finds out which state a leaf keeps, when it is known to be one.

        Raises:
            UnsupportedError: it changes state that other code may share.
        """
        inside = set(entry.target.modules())
        for change in entry.changes:
            if change.owner is None or change.owner.module not in inside:
                self._settle_shared(change, entry)
            elif change.owner.attribute == "_buffers":
                module = change.owner.module
                entry.stateful.setdefault(module, set()).update(module._buffers)
            elif self._is_shared(change, entry.target):
                self._settle_shared(change, entry)
            elif change.owner.attribute not in OF_MODULES:
                has_tensors = any(True for _ in fakes_in(change.now))
                # What a trial on other numbers has left there comes behind what the call has.
                if has_tensors or not any(
                    (module, name) == tuple(change.owner) for module, name, _ in entry.hidden
                ):
                    entry.hidden.append((*change.owner, change.now if has_tensors else None))
                # A list of weights, say, which a module makes anew where they are others.
                if not self._stands_for(change.now, change.before):
                    kept = entry.stateful.setdefault(change.owner.module, set())
                    kept.add(change.owner.attribute)
        entry.changes = []
        if entry.seen is Seen.NOTHING and any(
            has_hooks_of_packages(each[0]) for each in entry.hooked
        ):
            entry.seen = Seen.HOOKS

    def _stands_for(self, now: Any, before: Any) -> bool:
        """Whether all that is new are fakes in the places of a model's own tensors."""
        if isinstance(now, list) and isinstance(before, list):
            return len(now) == len(before) and all(map(self._stands_for, now, before))
        if isinstance(now, weakref.ref) and isinstance(before, weakref.ref):
            now, before = now(), before()
        return now is before or (
            isinstance(now, torch.Tensor)
            and isinstance(before, torch.Tensor)
            and self.fake_of(before) is now
        )

    def _settle_shared(self, change: Change, entry: Entry) -> None:
        added = change.added
        if added is None or (
            self._is_seen_by_glue(change)
            and not all(isinstance(each, torch.Tensor) for each in added.values())
        ):
            raise UnsupportedError(
                f"{entry.name} changes {change.path}, which code outside of it sees too: a class, "
                "a global, a closure, an object that is shared. It runs on one partition, and "
                "later than that code. Keep that state in an attribute of the module, or change "
                "it outside the modules that are called."
            )
        entry.seen = Seen.ALL

    def _is_shared(self, change: Change, leaf: nn.Module) -> bool:
        """Whether what a leaf changes by an attribute of its own is reached in other ways too."""
        # What is in one leaf is one in this, even if some of it is called by itself too.
        own = self.leaf_of.get(leaf)
        others = (self._places_of(each) for each in self.leaves if self.leaf_of[each] is not own)
        return bool(change.places) and (
            self._is_seen_by_glue(change)
            or any(not change.places.isdisjoint(places) for places in others)
        )

    def is_seen_by_code(self, change: Change) -> bool:
        """Whether code of a step, or of any module, sees a change: not hooks on gradients alone."""
        seen = (self._places_of(leaf) for leaf in self.leaves)
        return self._is_seen_by_glue(change) or any(map(change.places.intersection, seen))

    def _is_seen_by_glue(self, change: Change) -> bool:
        return not change.places.isdisjoint(self._places_of(None))

    def _places_of(self, leaf: nn.Module | None) -> set[Place]:
        """Returns what a leaf can change; of None, what all other code can."""
        if leaf not in self._reach:
            if leaf is None:
                rest = [module for module in self.names if module not in self.leaf_of]
                hooks = (each for model in self.models for each in model.forward_hooks.lifted())
                code = [*self._code, *(each.function for each in hooks)]
                self._reach[None] = Snapshot(rest, code, self.leaf_of.keys()).places()
            else:
                self._reach[leaf] = self.snapshot(leaf).places()
        return self._reach[leaf]


def _columns(
    places: Sequence[tuple[dict[str, Any], str, torch.Tensor]],
) -> tuple[list[dict[str, Any]], list[str], list[torch.Tensor]]:
    return (
        [one for one, *_ in places],
        [name for _, name, _ in places],
        [fake for *_, fake in places],
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _has_global_backward_hooks() -> bool:
    return bool(module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks)
