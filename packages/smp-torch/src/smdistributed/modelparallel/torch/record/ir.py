"""The intermediate representation of one captured microbatch of a step.

A ``Graph`` is a list of nodes in execution order. Tensor states, defined once:

- *input*: a tensor among the step function's arguments; every rank can have it.
- *attribute*: a parameter or buffer that glue code reads; a parameter lives on its owner's rank.
- *leaf*: one call of a module that sits whole on one partition; opaque.
- *call*: glue, one call of a torch function outside all leaves.
- *replicated*: a value that depends on inputs, buffers and constants only and carries no gradient;
  ranks that need it compute it again instead of receiving it.
- *gradient*: that of an activation, which the backward pass gives. What is computed from gradients
  is *late*: it stands apart from the nodes of the forward pass.
"""

from __future__ import annotations

import collections
import copy
import enum
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.planning.pass_tape import PassTape
from smdistributed.modelparallel.torch.record.calls.forward_hooks import Spot as HookSpot
from smdistributed.modelparallel.torch.record.calls.regions import Region
from smdistributed.modelparallel.torch.record.costs.work import Work
from smdistributed.modelparallel.torch.record.trace.taps import Tap
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.contents import Effects
from smdistributed.modelparallel.torch.state.elsewhere import looks_of
from smdistributed.modelparallel.torch.state.holders import MISSING
from smdistributed.modelparallel.torch.state.spots import Spot
from smdistributed.modelparallel.torch.state.switches import Autocast, Changes
from smdistributed.modelparallel.torch.tensors.nested import Path, equal, placeholders, text
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

#: Constants up to this many elements are compared by value.
_SMALL = 1 << 16

#: Parameters that require no gradient in a call, and do outside: modules, their names there.
Frozen = tuple[tuple[nn.Module, str], ...]


class NodeKind(enum.Enum):
    """What a node does."""

    INPUT = "input"
    CONSTANT = "constant"
    ATTRIBUTE = "attribute"
    LEAF = "leaf"
    CALL = "call"
    GRADIENT = "gradient"


class Leaf(NamedTuple):
    """A module that sits whole on one partition."""

    name: str
    partition: int


class Value:
    """A tensor that a node produces.

    Attributes:
        index: position among the values of the graph.
        node: the producer.
        source: where it stands in the producer's result; or the value whose tensor, or the memory
            of it, the producer changed in place; or where else a leaf leaves it.
        is_changed: it, or memory that it shares, is changed in place later.
        order: its dims by stride, the largest first: how it lies in memory.
    """

    __slots__ = (
        "_is_in_order",
        "_wire_shape",
        "device",
        "dtype",
        "index",
        "is_changed",
        "node",
        "num_bytes",
        "order",
        "replicated",
        "requires_grad",
        "shape",
        "source",
    )

    def __init__(
        self,
        index: int,
        node: Node,
        source: Path | Value | Tap,
        tensor: torch.Tensor,
        spec: TensorSpec,
    ) -> None:
        self.index = index
        self.node = node
        self.source = source
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.replicated = node.replicated
        self.is_changed = False
        self.shape = spec.shape
        self.requires_grad = spec.requires_grad
        self.order = tuple(sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim]))
        self._is_in_order = self.order == tuple(range(len(self.order)))
        self._wire_shape = [self.shape[dim] for dim in self.order]

    def wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of this value as it travels: dims in the order of memory."""
        # Memory is what travels; these two kinds of views say that it means something else.
        tensor = tensor.resolve_conj().resolve_neg()
        return tensor if self._is_in_order else tensor.permute(self.order)

    def wire_buffer(self, device: torch.device) -> torch.Tensor:
        """Returns a buffer for what ``wire`` sends."""
        return torch.empty(self._wire_shape, dtype=self.dtype, device=device)

    def from_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that ``wire`` made ``tensor`` of, in the same memory format."""
        if self._is_in_order:
            return tensor
        return tensor.permute([self.order.index(dim) for dim in range(len(self.order))])

    def piece(self, shape: Sequence[int]) -> Value:
        """Returns what stands for it where a rank has a piece of it, as it travels."""
        made = copy.copy(self)
        made.shape = tuple(shape)
        made.num_bytes = math.prod(shape) * self.dtype.itemsize
        made._wire_shape = [shape[dim] for dim in self.order]
        return made

    def like(self, node: Node, source: Path | Value | Tap, *, requires_grad: bool) -> Value:
        """Returns a value of another node, whose tensor looks like this one's; adds it there."""
        made = copy.copy(self)
        made.node, made.source, made.requires_grad = node, source, requires_grad
        made.replicated = made.is_changed = False
        node.outputs.append(made)
        return made

    def __repr__(self) -> str:
        return f"v{self.index}"


class Trial(NamedTuple):
    """What became of a leaf when it was tried out; see ``Node``, with modules by their places."""

    in_turn: str
    rewrites: bool
    stateful: Mapping[int, set[str]]
    work: Work
    draws: bool | None


@dataclass(eq=False)
class Node:
    """One step of the graph.

    Attributes:
        target: INPUT: position among the step's tensor arguments; CONSTANT: a tensor, or where the
            microbatch's own one stands behind the arguments; ATTRIBUTE: (module, attribute name);
            LEAF: the module; CALL: the torch function.
        name: what it is called in plans, messages and digests; the same on every rank.
        args, kwargs: templates with ``Value`` placeholders.
        lent: LEAF: what is put where it looks, for the time of its call: such templates, too.
        grad_enabled, autocast, default_dtype: the state it ran under.
        switches: of PyTorch's backends, that were set since the start of the step.
        modules, flags: LEAF: it and the modules in it, and whether each of them trained.
        frozen: LEAF: parameters in it that required no gradient in the call.
        stateful: LEAF: the modules in it, with the names of the attributes, buffers and parameters
            that it changes.
        decides: LEAF: it decides by numbers that fakes do not have.
        rewrites: LEAF: its next call may write to what this one was given, unseen by autograd.
        shown: LEAF: where tensors leave it that lie in the memory of what it keeps, and the
            parameters and buffers that lie there: others get copies, if its calls write to that.
        kept: LEAF: where those stand that it has put into attributes, too.
        reached: LEAF: parameters and buffers of other modules that it reads or writes to by itself,
            with whether their modules are whole.
        found: LEAF: those that have made what it computes with, gradients included, and finds in
            objects with state.
        effects: LEAF: what it does to these.
        in_turn: LEAF: why no other microbatch may run it between its two passes; else "".
        lifted, lifts: LEAF: what is lifted out of it, as of its entry.
        outside: LEAF: where forward hooks are that are lifted out of it.
        taken: LEAF: containers that have in the end what they had before its call.
        adds: LEAF: it adds to what code outside has too.
        structure: LEAF: of what it returns, with numbers and texts; None for a tensor alone.
        draw: the key of the random numbers that it draws: name of the module, number of its call,
            number of the draw in the call; None if it draws none.
        draws: whether it draws random numbers; None: nobody knows before it is computed.
        work: what its forward pass does.
        changes: values whose tensors it changes in place.
        aliases: others in their memory.
        shows: CALL: parameters, and buffers of whole modules, in whose memory its results lie.
        parted: CALL: values in memory that it has other tensors share, or share no more, in one
            process, and not here.
        taps: LEAF: where tensors leave it besides its result.
        region: the checkpointed call that it belongs to; None outside. Each rank sees to its own
            part.
        rank: pp_rank that runs it; -1 while undecided or replicated.
        segment: index of its segment; -1 likewise.
        late: it is a gradient, or is computed from one.
        beside: it takes part in differentiating that node, and runs where that does; LEAF: it is
            the same call once more, which leaves nothing behind.
        where: whose code has called it, for messages; "" where no script has.
        made: grows with each node that this process makes, of whichever graph.
    """

    index: int
    kind: NodeKind
    target: Any
    name: str
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    lent: list[tuple[Spot, Any]] = field(default_factory=list)
    grad_enabled: bool = True
    autocast: Autocast = ()
    default_dtype: torch.dtype = torch.float32
    switches: Changes = ()
    modules: tuple[nn.Module, ...] = ()
    flags: tuple[bool, ...] = ()
    frozen: Frozen = ()
    stateful: Mapping[nn.Module, set[str]] = field(default_factory=dict)
    decides: bool = False
    in_turn: str = ""
    rewrites: bool = False
    shown: dict[Path | Tap, frozenset[tuple[nn.Module, str]]] = field(default_factory=dict)
    kept: frozenset[Path] = frozenset()
    reached: Mapping[tuple[nn.Module, str], bool] = field(default_factory=dict)
    found: tuple[Node, ...] = ()
    effects: list[tuple[Carried, Effects]] = field(default_factory=list)
    lifted: tuple[nn.Module, ...] = ()
    lifts: bool = False
    outside: tuple[HookSpot, ...] = ()
    taken: list[Any] = field(default_factory=list)
    adds: bool = False
    structure: Any = None
    draw: tuple[str, int, int] | None = None
    draws: bool | None = False
    replicated: bool = False
    work: Work = field(default_factory=Work)
    outputs: list[Value] = field(default_factory=list)
    changes: list[Value] = field(default_factory=list)
    aliases: list[Value] = field(default_factory=list)
    shows: frozenset[tuple[nn.Module, str]] = frozenset()
    parted: list[Value] = field(default_factory=list)
    taps: list[Tap] = field(default_factory=list)
    region: Region | None = None
    rank: int = -1
    segment: int = -1
    late: bool = False
    beside: Node | None = None
    where: str = ""
    made: int = field(default_factory=itertools.count().__next__)

    @property
    def call(self) -> Node:
        """LEAF: the node of the script that makes this call."""
        return self if self.beside is None else self.beside.call

    @property
    def inputs(self) -> Iterator[Value]:
        """The values it reads."""
        contents = [content for _, content in self.lent]
        return placeholders((self.args, self.kwargs, contents), Value)

    @property
    def trial(self) -> Trial:
        """LEAF: what became of it when it was tried out, which each rank does by itself."""
        # What it writes to in other modules all have seen in its call.
        stateful = {
            place: self.stateful[module]
            for place, module in enumerate(self.modules)
            if module in self.stateful
        }
        return Trial(self.in_turn, self.rewrites, stateful, self.work, self.draws)

    def take(self, trials: Mapping[int, Trial], owner: int | None) -> None:
        """Takes what became of it on all ranks: what one has found holds for all.

        Args:
            trials: by pp_rank.
            owner: who has its state, by which it may do more or less; None: everybody.
        """
        if trials:
            teller = min(trials) if owner is None or owner not in trials else owner
            # Each rank has a tape of its own.
            self.work = replace(trials[teller].work, spans=self.work.spans)
        stateful = {module: set(names) for module, names in self.stateful.items()}
        for trial in trials.values():
            self.in_turn = self.in_turn or trial.in_turn
            self.rewrites |= trial.rewrites
            self.draws = any_draws((self.draws, trial.draws))
            for place, names in trial.stateful.items():
                stateful.setdefault(self.modules[place], set()).update(names)
        self.stateful = stateful

    @property
    def changed_views(self) -> Iterator[Value]:
        """The values, computed again wherever they are read, that show what it changes in place."""
        return (
            value.source
            for value in self.outputs
            if isinstance(value.source, Value) and value.source.replicated
        )

    def __repr__(self) -> str:
        return f"{self.outputs} = {self.name}"

    def line(self, value: Callable[[Value], str]) -> str:
        """Returns what it does as text; ``value`` gives the text of a value."""
        draw = "" if self.draw is None else f" draw {self.draw}"

        def name(obj: Any) -> str:
            return value(obj) if isinstance(obj, Value) else repr(obj)

        for spot, content in self.lent:
            found = "nothing" if content is MISSING else text(content, name)
            draw += f" lent {spot.name} {found}"
        draw += "".join(f" tap {tap}" for tap in self.taps)
        return (
            f"{self.kind.value} {self.name} {text(self.args, name)} {text(self.kwargs, name)}{draw}"
        )

    def does_as(self, other: Node) -> bool:
        """Whether the two do the same in their graphs, to the last constant."""
        return (
            (self.kind, self.name) == (other.kind, other.name)
            and (self.grad_enabled, self.autocast) == (other.grad_enabled, other.autocast)
            and (self.switches, self.default_dtype) == (other.switches, other.default_dtype)
            and (self.flags, self.frozen) == (other.flags, other.frozen)
            and (self.lifted, self.lifts) == (other.lifted, other.lifts)
            and self.outside == other.outside
            and equal(self.structure, other.structure, operator.eq)
            and [looks_of(each) for _, each in self.effects]
            == [looks_of(each) for _, each in other.effects]
            and (self.draw, self.replicated) == (other.draw, other.replicated)
            and self.draws == other.draws
            and _same_target(self.target, other.target)
            and [_facts(value) for value in self.outputs] == [_facts(v) for v in other.outputs]
            and [v.index for v in self.changes] == [v.index for v in other.changes]
            and self.taps == other.taps
            and (self.region, self.in_turn) == (other.region, other.in_turn)
            and equal(self.args, other.args, _same_value)
            and equal(self.kwargs, other.kwargs, _same_value)
            and [spot for spot, _ in self.lent] == [spot for spot, _ in other.lent]
            and equal([e for _, e in self.lent], [e for _, e in other.lent], _same_value)
        )


def any_draws(found: Iterable[bool | None]) -> bool | None:
    """Returns whether any of what is told of draws random numbers; None if nobody knows yet."""
    kinds = set(found)
    return True if True in kinds else None if None in kinds else False


def changed_attributes(node: Node) -> Iterator[Value]:
    """Yields the parameters and buffers that a call between modules changes."""
    for value in (*node.changes, *node.aliases):
        while isinstance(value.source, Value):
            value = value.source
        if value.node.kind is NodeKind.ATTRIBUTE:
            yield value


def _facts(value: Value) -> tuple[object, ...]:
    source = value.source.index if isinstance(value.source, Value) else value.source
    return (value.index, source, value.shape, value.dtype, value.device, value.requires_grad)


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, Value) and isinstance(other, Value):
        return one.index == other.index
    return one is other


def _same_target(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # A constant that the step makes anew in each recording.
        return one is other or (
            (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            and one.numel() <= _SMALL
            and torch.equal(one, other)
        )
    return bool(one == other)


class HookedGradient(NamedTuple):
    """What becomes of the gradient of an activation.

    Attributes:
        of: the activation.
        given: the gradient, as the backward pass gives it.
        final: what hooks have made of it, which goes on in its place.
    """

    of: Value
    given: Value
    final: Value


class ChangedBuffer(NamedTuple):
    """What a microbatch makes of a buffer of a split module.

    Attributes:
        value: what it is in the end.
        known: the same, where every rank can compute it before the step runs; else None.
        rank: that is to keep it; None: where it is made.
        is_same: it is what it was: other microbatches of the step change it.
    """

    value: Value
    known: Value | None
    rank: int | None = None
    is_same: bool = False


class Graph:
    """One captured microbatch.

    Attributes:
        nodes: in execution order.
        late: what is computed from gradients, in the order of the script.
        gradients: of activations, which the script looks at or changes.
        roots: the values that ``backward`` was called on.
        result: the values that the step function returned.
        numbers: the values that the step function took numbers from.
        written: what the arguments that it changed in place have become, by their positions.
        kept: the values that code between modules stored where they outlive the microbatch.
        buffers: of split modules, what becomes of those that it changes.
        constants: what each microbatch reads besides its arguments, in the order of the nodes'
            targets.
        tape: what its passes hold, as long as nobody has asked; None where it was not noted.
    """

    def __init__(self) -> None:
        self.tape: PassTape | None = None
        self.nodes: list[Node] = []
        self.late: list[Node] = []
        self.gradients: list[HookedGradient] = []
        self.num_values = 0
        self.roots: list[Value] = []
        self.result: Any = None
        self.numbers: list[Value] = []
        self.written: dict[int, Value] = {}
        self.kept: list[Value] = []
        self.buffers: dict[tuple[nn.Module, str], ChangedBuffer] = {}
        self.constants: list[Any] = []

    def names(self) -> list[str]:
        """Returns a name for each node that says what it computes from what, wherever it stands.

        Code that goes through a set makes the same nodes in another order in each process.
        """
        of_value: dict[Value, str] = {}
        seen: collections.Counter[str] = collections.Counter()
        names = []
        for node in self.nodes:
            line = node.line(of_value.__getitem__)
            digest = hashlib.sha256(line.encode()).hexdigest()[:12]
            names.append(f"{digest}.{seen[digest]}")
            seen[digest] += 1
            for position, value in enumerate(node.outputs):
                of_value[value] = f"{names[-1]}.{position}"
        return names

    @property
    def stateful(self) -> dict[nn.Module, set[str]]:
        """The modules that keep state, with the names of what calls change."""
        found: dict[nn.Module, set[str]] = {}
        for node in self.nodes:
            for module, names in node.stateful.items():
                found.setdefault(module, set()).update(names)
        return found

    def trials(self, names: Sequence[str]) -> dict[str, Trial]:
        """Returns what became of leaves that were tried out, by the names of their nodes.

        Args:
            names: as ``names`` gives them.
        """
        return {
            name: node.trial
            for name, node in zip(names, self.nodes, strict=True)
            if node.in_turn or node.rewrites or node.stateful or node.draws is not False
        }

    def take(
        self,
        names: Sequence[str],
        everyones: Sequence[Mapping[str, Trial]],
        owners: Mapping[nn.Module, int],
    ) -> None:
        """Takes what became of leaves on all ranks.

        Args:
            names: as ``names`` gives them.
            everyones: what ``trials`` gives on each pp_rank.
            owners: the pp_rank of each module that has one.
        """
        for name, node in zip(names, self.nodes, strict=True):
            found = {rank: trials[name] for rank, trials in enumerate(everyones) if name in trials}
            node.take(found, owners.get(node.modules[0]) if node.modules else None)

    def put_in_order(self, names: Sequence[str]) -> None:
        """Takes the order of another process's graph, if the graphs are alike."""
        own = self.names()
        if own == names or sorted(own) != sorted(names):
            return
        place = {name: position for position, name in enumerate(names)}
        self.nodes = [
            node
            for _, node in sorted(
                zip(map(place.__getitem__, own), self.nodes, strict=True), key=lambda pair: pair[0]
            )
        ]
        self.number()

    def number(self) -> None:
        """Numbers nodes and values in the order of the nodes."""
        index = 0
        for position, node in enumerate((*self.nodes, *self.late)):
            node.index = position
            for value in node.outputs:
                value.index = index
                index += 1

    def lines(self, where: Callable[[Node], str] = lambda node: "") -> list[str]:
        """Returns the graph as text, a line a node; ``where`` adds to it."""
        lines = [f"gradient of {each.of}: {each.given}, {each.final}" for each in self.gradients]
        for node in (*self.nodes, *self.late):
            facts = [(repr(v), v.shape, str(v.dtype), v.requires_grad) for v in node.outputs]
            lines.append(f"{node.line(repr)} -> {facts}{where(node)}")
        return lines

    def digest(self) -> str:
        """Returns a hash of what the nodes do; graphs with one hash are nearly always alike."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def does_as(self, other: Graph) -> bool:
        """Whether a replay of the one is a replay of the other."""
        return (
            len(self.nodes) == len(other.nodes)
            and all(map(Node.does_as, self.nodes, other.nodes))
            and len(self.late) == len(other.late)
            and all(map(Node.does_as, self.late, other.late))
            and [[v.index for v in each] for each in self.gradients]
            == [[v.index for v in each] for each in other.gradients]
            and [value.index for value in self.roots] == [value.index for value in other.roots]
            and [value.index for value in self.numbers] == [value.index for value in other.numbers]
            and {position: value.index for position, value in self.written.items()}
            == {position: value.index for position, value in other.written.items()}
            and [value.index for value in self.kept] == [value.index for value in other.kept]
            and [(slot, each.value.index) for slot, each in self.buffers.items()]
            == [(slot, each.value.index) for slot, each in other.buffers.items()]
            and equal(self.result, other.result, _same_value)
        )

    def add(self, node: Node) -> Node:
        """Appends a node."""
        (self.late if node.late else self.nodes).append(node)
        return node

    def bind(
        self, tensor: torch.Tensor, node: Node, source: Path | Value | Tap, spec: TensorSpec
    ) -> Value:
        """Makes the value for one tensor of a node's result, which has that spec then."""
        value = Value(self.num_values, node, source, tensor, spec)
        self.num_values += 1
        node.outputs.append(value)
        return value

    @property
    def returned(self) -> list[Value]:
        """The distinct values that every rank gets after the step, in order."""
        values = [*placeholders(self.result, Value), *self.numbers, *self.written.values()]
        return list(dict.fromkeys((*values, *self.kept)))
