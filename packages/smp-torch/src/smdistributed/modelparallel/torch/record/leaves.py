"""Leaves in a run on fakes: modules that sit whole on one partition, called once as a whole."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private import FakeTensorMode, storage_of, version_of
from smdistributed.modelparallel.torch.record.carried import Carried, CarriedObjects
from smdistributed.modelparallel.torch.record.costs import Meter
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.record.ir import Leaf, Node
from smdistributed.modelparallel.torch.record.leaf_memory import LeafMemory
from smdistributed.modelparallel.torch.record.modules import ModuleCalls, Randomness
from smdistributed.modelparallel.torch.record.nested import (
    fill,
    placeholders,
    tensor_paths,
    tensors_in,
)
from smdistributed.modelparallel.torch.record.python_state import StateWatch
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.taps import Tap, attribute_taps
from smdistributed.modelparallel.torch.record.values import Values


class LeafRuns:
    """Runs leaves on fakes, or remembers what they returned; leaves no trace in the modules.

    Args:
        models: that the leaves are of.
        leaves: where each leaf is.
        state: where the run is.
        values: of the graph.
        calls: of modules.
        meter: counts what the run does.
        mode: of the fakes.
        memory: what leaves returned in earlier recordings; None to remember nothing.
        random: the random numbers of the step.

    Attributes:
        watches: the Python state that each leaf read.
    """

    def __init__(
        self,
        models: Sequence[FakeModel],
        leaves: Mapping[nn.Module, Leaf],
        state: RunState,
        values: Values,
        calls: ModuleCalls,
        meter: Meter,
        mode: FakeTensorMode,
        memory: LeafMemory | None,
        random: Randomness,
    ) -> None:
        self.watches: list[StateWatch] = []
        self._new_watches: list[StateWatch] = []
        self._leaves = leaves
        self._state = state
        self._values = values
        self._calls = calls
        self._meter = meter
        self._mode = mode
        self._memory = memory
        self._random = random
        self._names = {module: name for model in models for module, name in model.names.items()}
        self._storages = {storage_of(fake) for model in models for fake in model.slots.values()}
        self._changed_state: dict[tuple[int, Any], tuple[str, Any]] = {}
        self._inner_calls: collections.Counter[nn.Module] = collections.Counter()
        self._inner_outputs: dict[int, tuple[Tap, torch.Tensor]] = {}
        self._copies: collections.defaultdict[int, CarriedObjects] = collections.defaultdict(
            lambda: CarriedObjects(Carried.stand_in)
        )

    def run(
        self,
        module: nn.Module,
        name: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        templates: Any,
        settings: tuple[object, ...],
    ) -> Any:
        """Returns what a leaf returns.

        Args:
            module: the leaf.
            name: of it, for messages.
            call: calls it.
            args, kwargs: its arguments.
            templates: of these.
            settings: grad mode and the like, under which it is called.

        Raises:
            UnsupportedError: it depends on what leaves of other ranks did to an object.
        """
        if any(True for _ in placeholders(templates, Carried)):
            return self._run_with_carried(module, name, call, args, kwargs, templates)
        memory = None if self._is_observed(module) else self._memory
        if memory is None:
            return self._run(module, lambda: call(*args, **kwargs))[0]
        arguments = memory.key(args, kwargs)
        meter = self._meter
        known = memory.find(module, arguments, settings)
        if known is not None:
            self.watches.append(known.watch)
            meter.flops += known.flops
            meter.random_draws += known.draws
            self._calls.current.child_draws += known.draws
            return memory.result(known, self._mode)
        flops, _, draws = meter.reading()
        tensors = tensors_in((args, kwargs))
        versions = [version_of(tensor) for tensor in tensors]
        result, _, watch = self._run(module, lambda: call(*args, **kwargs))
        storages = {*self._storages, *(storage_of(tensor) for tensor in tensors)}
        if (
            watch.changed() is None
            and versions == [version_of(tensor) for tensor in tensors]
            and not any(storage_of(tensor) in storages for _, tensor in tensor_paths(result))
        ):
            memory.add(
                module,
                arguments,
                settings,
                result,
                watch,
                meter.flops - flops,
                meter.random_draws - draws,
            )
        return result

    def note_outputs(self, module: nn.Module, result: Any) -> None:
        """Remembers what an inner module of a leaf returned, in case it leaves by another way."""
        number = self._inner_calls[module]
        self._inner_calls[module] += 1
        for path, tensor in tensor_paths(result):
            self._inner_outputs.setdefault(
                id(tensor), (Tap(module, number, path, self._names[module]), tensor)
            )

    def note_escapes(self, node: Node) -> None:
        """Remembers where a replay finds the tensors that a leaf made besides its result."""
        for tap, tensor in self._inner_outputs.values():
            self._values.note_escape(tensor, node, tap, again=True)
        for tap, tensor in attribute_taps(node.target, self._names):
            self._values.note_escape(tensor, node, tap, again=False)
        self._inner_outputs.clear()

    def restore(self) -> None:
        """Gives the Python state that leaves changed the values back that it had."""
        for watch in reversed(self._new_watches):
            watch.restore()

    def check_shared_state(self, glue: StateWatch) -> None:
        """Raises if glue reads or sets state that leaves change: microbatches would mix it up.

        In one process the glue of a microbatch comes after the leaves of the one before.

        Raises:
            UnsupportedError: it does.
        """
        for entry, (name, now) in self._changed_state.items():
            if glue.minds(entry, now):
                raise UnsupportedError(
                    f"{name} is changed by the module that has it, and read or set by code outside "
                    "it, in the forward of a module that is split over partitions or in the step "
                    "function. Put these modules on one partition, or keep that state inside one "
                    "module (for a cache of Transformers: use_cache=False)."
                )

    def _is_observed(self, leaf: nn.Module) -> bool:
        """Whether hooks see the calls of a leaf, or of modules in it: they must not be left out."""
        return any(
            not self._random.owns_hook(hook)
            for module in leaf.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )

    def _run(self, module: nn.Module, call: Callable[[], Any]) -> tuple[Any, list[str], StateWatch]:
        """Runs a leaf on fakes; returns its result, what it did, and the state that it read.

        A leaf runs for real in every replay; what is recorded of it serves only to answer questions
        about data while it runs on fakes.
        """
        self._inner_calls.clear()
        self._inner_outputs.clear()
        watch = StateWatch(whole=())
        for inner in module.modules():
            # A module may register hooks when it is called first.
            watch.keep(inner._forward_hooks, f"the hooks of {type(inner).__name__}")
        watch.begin(type(module).forward, module)
        try:
            with self._state.in_leaf(watch), self._values.aside() as graph:
                result = call()
        finally:
            watch.end()
            self._changed_state |= watch.changed_entries()
            watch.restore_random()
            self.watches.append(watch)
            self._new_watches.append(watch)
        return result, [node.line(repr) for node in graph.nodes], watch

    def _run_with_carried(
        self,
        module: nn.Module,
        name: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        templates: Any,
    ) -> Any:
        alike = self._run_on_copies(module, call, args, kwargs)
        result, lines, _ = self._run(module, lambda: call(*args, **kwargs))
        if lines != alike:
            kinds = {type(each.pristine).__name__ for each in placeholders(templates, Carried)}
            raise UnsupportedError(
                f"{name} depends on what modules of another partition left in an object of "
                f"class {', '.join(sorted(kinds))}. Put the modules that share it on one "
                "partition (for a key-value cache of Transformers: or use_cache=False)."
            )
        return result

    def _run_on_copies(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> list[str]:
        """Returns what a leaf does with its rank's copies of the objects that it is given.

        Leaves no trace but in the copies.
        """
        copies = self._copies[self._leaves[module].partition]
        args, kwargs = fill(self._values.template_of_carried((args, kwargs)), Carried, copies)
        kept = dict(self._inner_outputs)
        with self._calls.uncounted(), _without_hooks(module):
            _, lines, watch = self._run(module, lambda: call(*args, **kwargs))
        watch.restore()
        self._inner_outputs = kept
        return lines


@contextlib.contextmanager
def _without_hooks(leaf: nn.Module) -> Iterator[None]:
    """Keeps the hooks inside a leaf from seeing a run that the user's code did not ask for."""
    kept = []
    for module in leaf.modules():
        kept.append((module, module._forward_hooks, module._forward_pre_hooks))
        module._forward_hooks = collections.OrderedDict()
        module._forward_pre_hooks = collections.OrderedDict()
    try:
        yield
    finally:
        for module, hooks, pre_hooks in kept:
            module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks
