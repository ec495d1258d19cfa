"""Compiling a segment into a Python function.

Interpreting nodes costs a walk over every argument structure at each call. The generated function
is the straight-line code that a person would write: the same calls, in the same order, under the
same grad and autocast state, with intermediate results deleted at their last use. What the step
checkpointed is a function of its own in it, run under torch's activation checkpointing.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.execute.compiled_runs import CompiledRuns
from smdistributed.modelparallel.torch.execute.expressions import expression
from smdistributed.modelparallel.torch.execute.waiting_layers import that_can_wait
from smdistributed.modelparallel.torch.planning.recomputing import can_repeat, how_again, parts_of
from smdistributed.modelparallel.torch.planning.runs import (
    apart_from_runs,
    runs_of,
)
from smdistributed.modelparallel.torch.planning.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.record.calls.forward_hooks import hooks_off
from smdistributed.modelparallel.torch.record.calls.lifted_hooks import lifted
from smdistributed.modelparallel.torch.record.calls.regions import Again
from smdistributed.modelparallel.torch.record.ir import Frozen, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.taps import Tap, tapped
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.given import has_containers, leaving_as_given
from smdistributed.modelparallel.torch.state.switches import (
    Autocast,
    Changes,
    default_dtype,
    switched,
)
from smdistributed.modelparallel.torch.tensor_parallel.module import guard_of
from smdistributed.modelparallel.torch.tensors.nested import (
    Path,
    placeholders,
)
from smdistributed.modelparallel.torch.tensors.structure import has_structure, structure_of
from smdistributed.modelparallel.torch.trial.deciding import known_changes

#: (tensor arguments and constants of the microbatch, its carried objects, the segment's inputs)
#: -> its outputs
SegmentFunction = Callable[..., tuple[torch.Tensor, ...]]
#: (name of a leaf, what was recorded of its results, its results)
Check = Callable[..., None]
#: A line that gives a tensor its name.
_GIVEN = re.compile(r"\s*v(\d+) = ")
#: Grad mode, autocast, switches of backends, type of new tensors.
_State = tuple[bool, Autocast, Changes, torch.dtype]


def check_results(name: str, values: Sequence[Value], *tensors: torch.Tensor) -> None:
    """Makes sure that a leaf gave what the Python around it was told that it gives.

    Args:
        name: of the leaf.
        values: what was recorded of its results.
        tensors: its results.

    Raises:
        UnsupportedError: a result is of another kind.
    """
    for value, tensor in zip(values, tensors, strict=True):
        check_result(name, value, tensor, tensor.shape)


def check_result(name: str, value: Value, tensor: torch.Tensor, shape: torch.Size) -> None:
    """Makes sure of one result, of which this may be a piece.

    Args:
        name: of the leaf.
        value: what was recorded.
        tensor: the result.
        shape: of the whole.

    Raises:
        UnsupportedError: it is of another kind.
    """
    if isinstance(tensor, FakeTensor):
        raise UnsupportedError(
            f"{name} kept a stand-in tensor from the recording of the step, probably in a "
            "cache; clear the cache, or compute its content in __init__."
        )
    if (
        shape != value.shape
        or tensor.dtype is not value.dtype
        or tensor.device.type != value.device.type
    ):
        raise UnsupportedError(
            f"{name} returned a tensor {tuple(shape)} of {tensor.dtype} on "
            f"{tensor.device.type} where the recording had {value.shape} of {value.dtype} on "
            f"{value.device.type}: what it returns depends on data, or on state that has "
            "changed since. The Python around it has run already: keep what depends on it "
            "inside one module."
        )


def _alike(name: str, want: Any, result: Any) -> None:
    """Makes sure that a leaf returns the numbers and texts, and as many tensors, as recorded.

    Args:
        name: of the leaf.
        want: the structure that was recorded.
        result: what it returned.

    Raises:
        UnsupportedError: it is another one.
    """
    if not has_structure(want, result):
        raise UnsupportedError(
            f"{name} returned {structure_of(result)!r} where the recording had {want!r}: it "
            "depends on data, or on state that has changed since. The Python around it has run "
            "already: keep what depends on it inside one module."
        )


def _indices(node: Node) -> set[int]:
    return {value.index for value in node.outputs}


class flagged:  # noqa: N801 - reads as a function
    """Has modules train or not as they did when their call was recorded.

    Args:
        modules: a leaf and those in it.
        flags: whether each trains.
    """

    __slots__ = ("_flags", "_former", "_modules")

    def __init__(self, modules: Sequence[nn.Module], flags: tuple[bool, ...]) -> None:
        self._modules = modules
        self._flags = flags

    def __enter__(self) -> None:
        self._former = tuple([module.training for module in self._modules])
        if self._former != self._flags:
            self._give(self._flags)

    def __exit__(self, *exception: object) -> None:
        if self._former != self._flags:
            self._give(self._former)

    def _give(self, flags: tuple[bool, ...]) -> None:
        for module, flag in zip(self._modules, flags, strict=True):
            vars(module)["training"] = flag


@contextlib.contextmanager
def frozen(parameters: Frozen) -> Iterator[None]:
    """Has parameters require no gradient, as when a call was recorded."""
    found = [module._parameters[name] for module, name in parameters]
    for parameter in found:
        assert parameter is not None
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in found:
            assert parameter is not None
            parameter.requires_grad_(True)


class Draws(Protocol):
    """The random numbers of a step."""

    def drawing(self, name: str, call: int, draw: int) -> contextlib.AbstractContextManager[None]:
        """Seeds the generators for one draw, given its key."""

    def remember(self, call: int) -> None:
        """Takes note that the next call of a module, which has this number, comes once more."""

    def once_more(self, call: int) -> contextlib.AbstractContextManager[None]:
        """Inside, a call draws what it drew when it was remembered."""


@contextlib.contextmanager
def statistics_kept(stateful: Mapping[nn.Module, set[str]]) -> Iterator[None]:
    """Inside, a call changes copies of the buffers that it changes.

    Args:
        stateful: the modules, with the names of these.
    """
    slots = [
        (module._buffers, name, module._buffers[name])
        for module, names in stateful.items()
        for name in names
    ]
    for buffers, name, buffer in slots:
        buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for buffers, name, buffer in slots:
            buffers[name] = buffer


class Program:
    """The function of one segment.

    Args:
        plan: the plan that the segment belongs to.
        segment: the segment.
        device: where it runs.
        random: of the step.
        compiled: compiles what lies between modules; None: it runs as it is.
        check: raises if results of a leaf are not what was recorded, given its name and these.

    Attributes:
        source: the generated code, for people who debug.
        file: what tracebacks call it.
        leaves: the modules that it calls.
    """

    def __init__(
        self,
        plan: Plan,
        segment: SegmentNodes,
        device: torch.device,
        random: Draws,
        compiled: CompiledRuns | None = None,
        check: Check = check_results,
    ) -> None:
        self._device = device
        self._nodes = segment.nodes
        self._compiled = compiled
        self._plan = plan
        leaves = [node.target for node in plan.graph.nodes if node.kind is NodeKind.LEAF]
        self.leaves = {node.target for node in segment.nodes if node.kind is NodeKind.LEAF}
        self._stateful = plan.graph.stateful
        self._called_again = {leaf for leaf, calls in Counter(leaves).items() if calls > 1}
        self._names: dict[str, Any] = {
            "__name__": __name__,  # what is said of a line of the script looks past this code
            "torch": torch,
            "drawing": random.drawing,
            "remember": random.remember,
            "once_more": random.once_more,
            "statistics_kept": statistics_kept,
            "checkpoint": checkpoint,
            "set_checkpoint_early_stop": set_checkpoint_early_stop,
            "switched": switched,
            "default_dtype": default_dtype,
            "flagged": flagged,
            "frozen": frozen,
            "checked": check,
            "alike": _alike,
            "lifted": lifted,
            "hooks_off": hooks_off,
        }
        self._constants: dict[int, str] = {}
        lines = self._lines(segment)
        parameters = ", ".join(
            ["inputs", "carried", *(f"v{value.index}" for value in segment.inputs)]
        )
        results = "".join(f"v{value.index}, " for value in segment.outputs)
        lines = [f"def segment_{segment.index}({parameters}):", *lines, f"    return ({results})"]
        self.source = "\n".join(lines)
        self.file = f"<segment {segment.index}>"
        exec(compile(self.source, self.file, "exec"), self._names)
        self.run: SegmentFunction = self._names[f"segment_{segment.index}"]

    def node_at(self, line: int) -> Node | None:
        """Returns the node that a line of the source computes, if it gives a tensor."""
        for text in self.source.splitlines()[line - 1 :]:
            if (found := _GIVEN.match(text)) is not None:
                return next((n for n in self._nodes if int(found[1]) in _indices(n)), None)
        return None

    def _lines(self, segment: SegmentNodes) -> list[str]:
        # A cut value belongs to its producer: change a copy.
        lines = [
            f"    v{value.index} = v{value.index}.clone()"
            for value in segment.inputs
            if value in segment.changed
        ]
        kept = set(segment.outputs)
        for region, nodes in parts_of(segment.nodes):
            later = kept | _read_after(segment, nodes)
            if region is not None and can_repeat(nodes):
                lines += self._checkpointed(nodes, later)
            elif self._compiled is None:
                lines += self._straight(nodes, later)
            else:
                lines += self._with_runs(nodes, later, self._compiled)
        return lines + self._settled(segment)

    def _with_runs(
        self, nodes: Sequence[Node], later: set[Value], compiled: CompiledRuns
    ) -> list[str]:
        """Returns the calls of nodes, those of runs as functions."""
        parts: list[list[str]] = []
        apart = apart_from_runs(self._plan.graph, self._plan.late)
        for part, is_run in reversed(list(runs_of(nodes, apart))):
            run = self._run(part, later, compiled) if is_run else self._straight(part, later)
            parts.append(run)
            later = later.union(*map(_read, part))
        return [*itertools.chain(*reversed(parts))]

    def _checkpointed(self, nodes: Sequence[Node], later: set[Value]) -> list[str]:
        """Returns a nested function and its call.

        What it reads from before are its parameters: a deleted variable would be missing when the
        backward pass calls it again. Its draws are keyed, so no random state is kept.
        """
        parameters, results, dead = _outside(nodes, later)
        how = how_again(self._plan.graph, nodes)
        options = f"use_reentrant={how is Again.REENTRANT}, preserve_rng_state=False"
        # Objects with state are found as they were, too.
        turns = any(map(_objects_given, nodes))
        given = ["carried.each_time()"] * turns + parameters
        call = f"checkpoint({', '.join(['region', *given, options])})"
        stops = "" if how is Again.AS_NEEDED else "with set_checkpoint_early_stop(False): "
        return [
            *(f"    {line}" for line in self._function("region", nodes, later, turns=turns)),
            f"    {stops}{f'({results}) = ' if results else ''}{call}",
            f"    del {', '.join(['region', *dead])}",
        ]

    def _function(
        self, name: str, nodes: Sequence[Node], later: set[Value], *, turns: bool = False
    ) -> list[str]:
        """Returns a function of what is read from before.

        Args:
            turns: it finds the objects with state of each turn by what it is given first.
        """
        parameters, results, _ = _outside(nodes, later)
        returned = {value for node in nodes for value in node.outputs if value in later}
        return [
            f"def {name}({', '.join(['turns'] * turns + parameters)}):",
            *(["    carried = next(turns)"] * turns),
            *self._straight(nodes, returned),
            f"    return ({results})",
        ]

    def _run(self, nodes: Sequence[Node], later: set[Value], compiled: CompiledRuns) -> list[str]:
        """Returns the call of a function that does what nodes do, which is compiled."""
        parameters, results, dead = _outside(nodes, later)
        source = "\n".join(self._function("run", nodes, later))
        looks = tuple(
            (value.shape, value.order, value.dtype, value.device, value.requires_grad)
            for node in nodes
            for value in _read(node)
        )
        name = self._constant(compiled.of(source, self._names, looks))
        return [
            f"    ({results}) = {name}({', '.join(parameters)})",
            *([f"    del {', '.join(dead)}"] if dead else []),
        ]

    def _straight(self, nodes: Sequence[Node], later: set[Value]) -> list[str]:
        """Returns the calls of nodes one after another; values not needed ``later`` are deleted."""
        lines = []
        last_use = _last_uses(nodes, later)
        state: _State = (True, (), (), torch.float32)
        indent = "    "
        for node in nodes:
            if node.kind in (NodeKind.LEAF, NodeKind.CALL) and self._state(node) != state:
                state = self._state(node)
                header, indent = self._with(state)
                lines += header
            for line in self._node(node):
                lines.append(indent + line)
            dead = [f"v{value.index}" for value in last_use.get(node, ())]
            if dead:
                lines.append(indent + "del " + ", ".join(dead))
        return lines

    @staticmethod
    def _state(node: Node) -> _State:
        return node.grad_enabled, node.autocast, node.switches, node.default_dtype

    def _with(self, state: _State) -> tuple[list[str], str]:
        managers = []
        if not state[0]:
            managers.append("torch.no_grad()")
        for device, dtype in state[1]:
            managers.append(f"torch.autocast({device!r}, dtype={dtype})")
        if state[2]:
            managers.append(f"switched({state[2]!r})")
        if state[3] is not torch.float32:
            managers.append(f"default_dtype({state[3]})")
        if not managers:
            return [], "    "
        return [f"    with {', '.join(managers)}:"], "        "

    def _node(self, node: Node) -> list[str]:
        if node.kind in (NodeKind.INPUT, NodeKind.CONSTANT):
            value = node.outputs[0]
            given = f"inputs[{node.target}]"
            if not isinstance(node.target, int):
                given = self._constant(node.target)
            # Several segments and replays start from it: change a copy.
            return [f"v{value.index} = {given}{'.clone()' if value.is_changed else ''}"]
        if node.kind is NodeKind.ATTRIBUTE:
            (module, name), value = node.target, node.outputs[0]
            # The microbatch changes a copy, which its backward pass may read.
            is_copy = node.target in self._plan.graph.buffers or (
                value.replicated and value.is_changed
            )
            read = f"getattr({self._constant(module)}, {name!r})"
            return [f"v{value.index} = {read}{'.clone()' if is_copy else ''}"]
        arguments = [self._expression(item) for item in node.args]
        arguments += [f"{key}={self._expression(item)}" for key, item in node.kwargs.items()]
        seeded = "" if node.draw is None else f"with drawing(*{node.draw!r}): "
        if node.kind is NodeKind.LEAF:
            seeded = f"with flagged({self._constant(node.modules)}, {node.flags!r})"
            if node.frozen:
                seeded += f", frozen({self._constant(node.frozen)})"
            if node.decides:
                seeded += f", {self._constant(self._known_changes(node))}"
            guard = guard_of(node.target, node.name)
            if guard.slots:
                seeded += f", {self._constant(guard)}.on()"
            if node.lifted or node.lifts:
                seeded += f", lifted({self._constant(node.lifted)})"
            if node.outside:
                seeded += f", hooks_off({self._constant(node.outside)})"
            if node.beside is not None:
                seeded += f", once_more({node.call.index})"
                if node.stateful:
                    seeded += f", statistics_kept({self._constant(node.stateful)})"
            for spot, content in node.lent:
                seeded += f", {self._constant(spot)}.showing({self._expression(content)})"
            seeded += ": "
        call, results = that_can_wait(node.target), "result"
        if node.taps or node.taken:
            call, results = tapped(node.target, node.taps, node.taken), "result, taps"
        if node.kind is NodeKind.LEAF and has_containers(node.args, node.kwargs):
            call = leaving_as_given(call, node.name)
            objects = "".join(f"o{each.index}, " for each in _objects_given(node))
            arguments.insert(0, f"({objects})")
        target = self._constant(call)
        lines = [f"{seeded}{results} = {target}({', '.join(arguments)})"]
        for each in _objects_given(node):
            history = self._constant(self._plan.histories[each])
            is_told = self._is_told(node, each)
            given = f"{history}, {node.index}, is_told={is_told}"
            lines.insert(0, f"o{each.index} = carried.of({given})")
            if is_told and any(carried is each for carried, _ in node.effects):
                lines.append(f"carried.check({history}, {node.index})")
        if node.kind is NodeKind.LEAF and node in self._plan.comes_again:
            lines.insert(0, f"remember({node.index})")
        for output in node.outputs:
            if isinstance(output.source, Value):
                expression = f"v{output.source.index}"
            elif isinstance(output.source, Tap):
                expression = f"taps[{node.taps.index(output.source)}]"
            else:
                expression = "result" + _access(output.source)
            slots = node.shown.get(output.source)  # type: ignore[arg-type]
            if slots is not None and (node.stateful or not slots or self._is_written(slots)):
                expression += ".clone()"
            lines.append(f"v{output.index} = {expression}")
        if node.structure is not None:
            lines.append(f"alike({node.name!r}, {self._constant(node.structure)}, result)")
        lines.append(f"del {results}")
        if node.kind is NodeKind.LEAF:
            values = tuple(each for each in node.outputs if not isinstance(each.source, Value))
            given = "".join(f", v{each.index}" for each in values)
            lines.append(f"checked({node.name!r}, {self._constant(values)}{given})")
        return lines

    def _is_written(self, slots: Iterable[tuple[nn.Module, str]]) -> bool:
        """Returns whether calls of any module change parameters or buffers."""
        return any(name in self._stateful.get(module, ()) for module, name in slots)

    def _is_told(self, node: Node, carried: Carried) -> bool:
        """Whether other ranks are given an object later than a node."""
        return any(
            each.rank != node.rank and carried in _objects_given(each)
            for each in self._plan.graph.nodes[node.index + 1 :]
        )

    def _settled(self, segment: SegmentNodes) -> list[str]:
        """Returns what compares the objects of which others are told, after all modules."""
        given: dict[Carried, list[Node]] = {}
        for node in segment.nodes:
            for each in _objects_given(node):
                given.setdefault(each, []).append(node)
        told = [each for each, nodes in given.items() if self._is_told(nodes[-1], each)]
        if not told:
            return []
        histories = self._constant(tuple(self._plan.histories[each] for each in told))
        names = dict.fromkeys(node.name for each in told for node in given[each])
        return [f"    carried.settle({histories}, {', '.join(names)!r})"]

    def _known_changes(self, node: Node) -> known_changes:
        is_last = node.target not in self._called_again and not any(
            value.requires_grad for value in node.outputs
        )
        return known_changes(node.name, node.target, node.stateful, is_last=is_last)

    def _constant(self, obj: Any) -> str:
        name = self._constants.setdefault(id(obj), f"c{len(self._constants)}")
        self._names[name] = obj
        return name

    def _expression(self, obj: Any) -> str:
        return expression(obj, self._name, self._constant)

    def _name(self, obj: Any) -> str | None:
        if isinstance(obj, Value):
            return f"v{obj.index}"
        if isinstance(obj, Carried):
            return f"o{obj.index}"
        if isinstance(obj, Container):
            return f"{self._constant(obj)}.build({self._expression(obj.items)})"
        return None


def _objects_given(node: Node) -> list[Carried]:
    """Returns the objects with state that a node is given."""
    return list(dict.fromkeys(placeholders((node.args, node.kwargs), Carried)))


def _access(path: Path) -> str:
    return "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in path)


def _read(node: Node) -> list[Value]:
    """Returns the values that a node's code names, other than those it makes."""
    return [*node.inputs, *(v.source for v in node.outputs if isinstance(v.source, Value))]


def _outside(nodes: Sequence[Node], later: set[Value]) -> tuple[list[str], str, list[str]]:
    """Returns what a function of nodes is given and gives back, and what nobody needs after it."""
    made = {value for node in nodes for value in node.outputs}
    read = list(dict.fromkeys(v for node in nodes for v in _read(node) if v not in made))
    results = "".join(f"v{v.index}, " for node in nodes for v in node.outputs if v in later)
    return [f"v{v.index}" for v in read], results, [f"v{v.index}" for v in read if v not in later]


def _read_after(segment: SegmentNodes, nodes: Sequence[Node]) -> set[Value]:
    following = segment.nodes[segment.nodes.index(nodes[0]) + 1 :]
    return {value for each in following if each not in nodes for value in _read(each)}


def _last_uses(nodes: Sequence[Node], later: set[Value]) -> dict[Node, list[Value]]:
    """Returns, for each node, the values that nothing after it needs."""
    last: dict[Value, Node] = {}
    for node in nodes:
        last |= dict.fromkeys([*node.outputs, *_read(node)], node)
    dead: dict[Node, list[Value]] = {}
    for value, node in last.items():
        if value not in later:
            dead.setdefault(node, []).append(value)
    return dead
