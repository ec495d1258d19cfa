"""Leaves in a run on fakes: modules that sit whole on one partition, called once as a whole."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.record.calls.forward_hooks import HookCall
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.ir import Graph
from smdistributed.modelparallel.torch.record.leaves.lending import Done, tensors_left
from smdistributed.modelparallel.torch.record.leaves.modules import ModuleCalls, Randomness
from smdistributed.modelparallel.torch.record.leaves.spans import made_by_calls
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.taps import (
    Tap,
    attribute_taps,
    container_taps,
    has_hooks_of_others,
    hooks_of_packages_removed,
)
from smdistributed.modelparallel.torch.record.trace.tree import Constant, Entry, HookedCall
from smdistributed.modelparallel.torch.record.trace.values import Values
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.elsewhere import ElsewhereError
from smdistributed.modelparallel.torch.state.growth import Growth
from smdistributed.modelparallel.torch.state.python_random import python_random_kept
from smdistributed.modelparallel.torch.state.snapshot import Change
from smdistributed.modelparallel.torch.tensors.nested import (
    fill,
    placeholders,
    tensor_paths,
    tensors_in,
)
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec
from smdistributed.modelparallel.torch.tensors.writes import large_arrays_copied, writes_of

#: Tensors that a leaf makes besides its result, by id, and where a replay finds them.
Inner = dict[int, tuple[Tap, torch.Tensor]]


@dataclass(frozen=True)
class LeafRun:
    """What a leaf did on fakes.

    Attributes:
        result: what it returned.
        inner: the tensors that it made besides.
        changes: the Python state that it changed, put back already.
        hooked: the calls in it, its own included, that have hooks of others.
        grown: what it added to containers that others see: not yet taken out.
        lines: what it did and returned, as text.
        read: what it read that no recorded call made.
        hook_calls: the calls of hooks that are lifted out of it.
        made: what it called.
        borrowed: what it read that code outside of it has made, and the parameters and buffers.
        done: what else may matter to who lends it that.
    """

    result: Any
    inner: Inner
    changes: list[Change]
    hooked: list[HookedCall]
    grown: list[Growth]
    lines: list[str]
    read: list[torch.Tensor | Constant]
    hook_calls: list[HookCall]
    made: list[Entry]
    borrowed: list[torch.Tensor]
    done: Done


class LeafRuns:
    """Runs leaves on fakes; leaves no trace in the modules.

    Args:
        scene: the models.
        state: where the run is.
        calls: of modules.
        random: the random numbers of the step.
        fake: returns what stands for a tensor.
    """

    def __init__(
        self,
        scene: Scene,
        state: RunState,
        calls: ModuleCalls,
        random: Randomness,
        fake: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._random = random
        self._fake = fake
        self._scene = scene
        self._state = state
        self._calls = calls
        self._inner_calls: collections.Counter[nn.Module] = collections.Counter()
        self._inner: Inner = {}
        self._hooked: list[HookedCall] = []
        self._hook_calls: list[HookCall] = []

    def run(self, values: Values, module: nn.Module, call: Callable[[], Any]) -> LeafRun:
        """Runs a leaf, and puts back whatever it changed in Python and nobody else sees.

        It runs for real in every step; what is recorded of it serves only to answer questions
        about data while it runs on fakes.
        """
        self.begin()
        snapshot = self._scene.snapshot(module)
        possible = len(self._state.possible)
        with self.apart(values) as graph:
            try:
                result = call()
                inner = self.inner_of(module)
                read, written = [*values.read], values.written
            finally:
                changes = [*snapshot.note_changes(), *self._state.possible[possible:]]
                grown = snapshot.put_back()
            made = values.made
            lines = values.text(graph, map(self._fake, tensors_in(result)))
            kept = filter(values.is_from_outside, tensors_left(result, changes))
            borrowed = values.borrowed | {id(tensor): tensor for tensor in kept}
        region = self._state.region
        for tap, tensor in (*made_by_calls(made, region), *container_taps(grown)):
            inner.setdefault(id(tensor), (tap, tensor))
        has_regions = any(node.region not in (None, region) for node in graph.nodes)
        done = Done(snapshot, changes, grown, written, has_regions)
        return LeafRun(
            *(result, inner, changes, self._hooked, grown, lines, read),
            *(self._hook_calls, made, list(borrowed.values()), done),
        )

    def lines_of(
        self, values: Values, entries: Sequence[Entry], returned: Sequence[torch.Tensor]
    ) -> list[str]:
        """Returns what calls that were made in a leaf do, as ``LeafRun.lines`` says it."""
        with self._state.in_leaf():
            return values.text_of(entries, returned)

    @contextlib.contextmanager
    def apart(self, values: Values) -> Iterator[Graph]:
        """Inside, a leaf runs on fakes as if nobody had asked for it; yields what it does."""
        with (
            self._random.kept(),
            python_random_kept(),
            self._state.in_leaf(),
            values.aside() as graph,
            large_arrays_copied(),
        ):
            yield graph

    def begin(self) -> None:
        """Starts to collect what inner modules return."""
        self._inner_calls.clear()
        self._inner = {}
        self._hooked = []
        self._hook_calls = []

    def note_hook(self, call: HookCall) -> None:
        """Remembers the call of a hook that is lifted out of a leaf."""
        self._hook_calls.append(call)

    def note_call(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Remembers what an inner module of a leaf returned, in case it leaves by another way."""
        if has_hooks_of_others(module):
            self._hooked.append(HookedCall(module, args, kwargs, result))
        number = self._inner_calls[module]
        self._inner_calls[module] += 1
        for path, tensor in tensor_paths(result):
            self._inner.setdefault(
                id(tensor), (Tap(module, number, path, self._scene.names[module]), tensor)
            )

    def inner_of(self, module: nn.Module) -> Inner:
        """Returns the tensors that a leaf made besides its result, also those in attributes."""
        found = dict(self._inner)
        for tap, tensor in attribute_taps(module, self._scene.names):
            found.setdefault(id(tensor), (tap, tensor))
        return found

    def run_on_copies(
        self,
        values: Values,
        module: nn.Module,
        call: Callable[..., Any],
        templates: tuple[Any, Any],
    ) -> LeafRun:
        """Returns what a leaf does on its rank's copies; leaves no trace."""
        assert self._scene.leaves is not None
        copies = values.copies.of(self._scene.leaves[module].partition)
        args, kwargs = fill(templates, Carried, copies)
        kept = self._inner, self._inner_calls.copy(), self._hooked, self._hook_calls
        with self._calls.uncounted(), hooks_of_packages_removed(module):
            try:
                run = self.run(values, module, lambda: call(*args, **kwargs))
            except SMPError as error:
                if not isinstance(error, ElsewhereError):
                    raise
                raise depends_on_others(self._scene.names[module], templates) from error
            except Exception as error:
                # It ran on the objects themselves.
                raise depends_on_others(self._scene.names[module], templates) from error
        for growth in run.grown:
            growth.remove()
        self._inner, self._inner_calls, self._hooked, self._hook_calls = kept
        return run


def depends_on_others(name: str, templates: Any) -> UnsupportedError:
    """Returns the error of a leaf that does something else on its rank's copies of objects.

    Args:
        name: of the leaf.
        templates: of its arguments.
    """
    kinds = {type(each.pristine).__name__ for each in placeholders(templates, Carried)}
    return UnsupportedError(
        f"{name} depends on what modules of another partition left in an object of class "
        f"{', '.join(sorted(kinds))}. Put the modules that share it on one partition (for a "
        "key-value cache of Transformers: or use_cache=False)."
    )


class Watch:
    """Sees what a call of a module does, from its arguments and the meter.

    Args:
        meter: counts.
        random: the random numbers of the step.
        state: where the run is.
        module: that is called.
        arguments: of the call.
    """

    def __init__(
        self,
        meter: Meter,
        random: Randomness,
        state: RunState,
        module: nn.Module,
        arguments: Any,
    ) -> None:
        self._meter = meter
        self._state = state
        self._noted = state.backward_code, state.gradient_reads
        self._parameter_hooks = state.parameter_hooks
        self._questions = state.questions
        self._written_again = len(state.written_again)
        self._real_runs = state.real_runs
        self._reading = meter.reading()
        self._random = random
        self._drawn_in_python = random.drawn_in_python
        tensors = tensors_in(arguments)
        self._tensors = [(each, writes_of(each)) for each in tensors]
        self._specs = [TensorSpec.of(each) for each in tensors]
        self._own = [
            (inner, name, each, writes_of(each))
            for inner in module.modules()
            for name, each in (*inner._buffers.items(), *inner._parameters.items())
            if each is not None
        ]

    def tell(self, entry: Entry) -> None:
        """Notes it in an entry."""
        entry.work = self._meter.work_since(self._reading)
        noted = self._state.backward_code, self._state.gradient_reads
        entry.runs_backward = noted != self._noted
        if self._state.parameter_hooks != self._parameter_hooks:
            entry.in_turn = "it puts hooks on gradients, which other microbatches may have too"
            entry.sees_backward = True
        entry.asks = self._state.questions != self._questions
        entry.decides = entry.asks or self._state.real_runs != self._real_runs
        has_drawn = (
            self._meter.random_draws != self._reading.random_draws
            or self._random.drawn_in_python != self._drawn_in_python
        )
        is_untold = entry.decides or self._meter.untold != self._reading.untold
        entry.draws = has_drawn or (None if is_untold else False)
        entry.changed = [each for each, before in self._tensors if writes_of(each) != before]
        entry.repeats = [TensorSpec.of(each) for each, _ in self._tensors] != self._specs
        if any(
            each.requires_grad and version_of(each) == version
            for each, (version, *_) in self._tensors
            if any(each is other for other in entry.changed)
        ):
            entry.refusal = (
                f"{entry.name} writes to an argument through .data, where autograd does not see "
                "it: the gradient would depend on the partition. Use an operation on the tensor."
            )
        written = set(self._state.written_again[self._written_again :])
        entry.recomputes = any(id(each) in written for _, _, each, _ in self._own)
        self.tell_state(entry)

    def tell_state(self, entry: Entry) -> None:
        """Notes the parameters and buffers that it writes to in an entry."""
        for inner, name, each, state in self._own:
            if writes_of(each) != state:
                entry.stateful.setdefault(inner, set()).add(name)
