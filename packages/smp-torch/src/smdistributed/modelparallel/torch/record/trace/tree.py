"""What is known of a step function: a tree of the calls that its microbatches made.

Each call of a torch function or of a leaf is an *entry*: what was called, with what, under which
settings, and what it gave on fakes. Microbatches that do the same share entries; where one does
something else, the tree branches. A way from the root to an end has a graph. References to earlier
results are the recorded fakes themselves, so that comparing a call with its entry is comparing
identities.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.calls.forward_hooks import HookCall, Signature
from smdistributed.modelparallel.torch.record.calls.regions import Region
from smdistributed.modelparallel.torch.record.costs.work import Work
from smdistributed.modelparallel.torch.record.ir import Frozen, Graph, Value
from smdistributed.modelparallel.torch.record.trace.taps import Tap
from smdistributed.modelparallel.torch.state.snapshot import Change
from smdistributed.modelparallel.torch.state.spots import Spot
from smdistributed.modelparallel.torch.state.switches import Settings
from smdistributed.modelparallel.torch.tensors.nested import Path, tensors_in
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.record.questions.question import Question
    from smdistributed.modelparallel.torch.record.trace.stored import Stored
    from smdistributed.modelparallel.torch.state.carried import Carried
    from smdistributed.modelparallel.torch.state.contents import Effects
    from smdistributed.modelparallel.torch.state.growth import Growth


class EntryKind(enum.Enum):
    """What an entry is."""

    START = "start"
    CALL = "call"
    LEAF = "leaf"
    QUESTION = "question"
    NUMBER = "number"
    BACKWARD = "backward"
    #: A hook is put on an activation, or its gradient is to be kept.
    WATCHED = "watched"
    #: The gradient of an activation arrives.
    GRADIENT = "gradient"
    #: Its hooks have run.
    HOOKED = "hooked"
    END = "end"


class Seen(enum.Enum):
    """What code outside a leaf can see of its call, besides the result."""

    NOTHING = "nothing"
    #: What hooks in it carry out: they are called in each microbatch.
    HOOKS = "hooks"
    #: What it adds to containers: it runs on fakes in each microbatch.
    ALL = "all"


class HookedCall(NamedTuple):
    """A call of a module that has forward hooks, as its hooks see it."""

    module: nn.Module
    args: Any
    kwargs: Any
    result: Any


class Constant:
    """Stands in an entry for a tensor that is not of the run: an attribute, a global.

    What it holds is read anew in each microbatch.

    Attributes:
        tensor: the first one that stood there; only what it looks like counts.
    """

    __slots__ = ("_kind", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._kind = _kind(tensor)

    def __repr__(self) -> str:
        return f"constant {tuple(self.tensor.shape)}"

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can take its place."""
        return tensor is self.tensor or self._kind == _kind(tensor)


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device,
        tensor.stride(),
        tensor.requires_grad,
        type(tensor),
    )


@dataclass(eq=False, slots=True)
class Entry:
    """One call.

    Attributes:
        kind: what it is.
        target: what was called.
        name: of it, for messages.
        args, kwargs: templates, with the fakes of the run in the places of tensors.
        settings: under which it was called.
        modules: LEAF: it and the modules in it.
        flags: LEAF: whether each of them trains.
        frozen: LEAF: parameters in it that require no gradient in the call.
        result: template of what it gave; BACKWARD: the watched activations that it comes to, in
            the order in which it does.
        is_fixed: the result itself can be given again: nobody can change it.
        outputs: the tensors in the result and where they stand.
        changed: tensors that it changes in place.
        specs: by id, how the tensors look right after it that it gives or changes, and those that
            share memory with what it changes.
        repeats: it changes the looks of fakes, so that it is done to them in each microbatch.
        draw, draws, work, region: as in ``Node``.
        recomputes: LEAF: it checkpoints a call in it that writes to buffers of its own.
        inner: LEAF: tensors that it made besides its result, by id, and where a replay finds them.
        changes: LEAF: the Python state that it changes.
        hidden: LEAF: attributes of its modules that it changes, and the tensor, or the tuple around
            some, that is in them.
        stateful: LEAF: the modules in it, with the names of the attributes, buffers and parameters
            that it changes.
        asks: LEAF: it decides by inputs of the step.
        decides: LEAF: it decides by numbers that fakes do not have.
        runs_backward: LEAF: its backward pass runs code of the user's.
        checkpoints: LEAF: there are checkpointed calls in it.
        shown: LEAF: where in its result tensors stand that lie in the memory of what it keeps, and
            the parameters and buffers that lie there.
        kept: LEAF: where those stand that it has put into attributes, too.
        reached: LEAF: parameters and buffers of other modules that it reads or writes to by itself.
        rewrites: LEAF: its next call may write to what this one was given, unseen by autograd.
        in_turn: LEAF: why no other microbatch may run it between its two passes; else "".
        sees_backward: LEAF: its next forward pass may see what a backward pass has changed.
        seen: LEAF: what code outside can see of it besides its result.
        hooked: LEAF: the calls of modules in it, and its own, that have hooks of others.
        lifted: LEAF: the modules in it whose hooks on their backward pass are lifted out.
        lifts: LEAF: hooks that its forward hooks put on activations are.
        hooks: LEAF: the forward hooks on the modules in it.
        hook_calls: LEAF: the calls of those that are lifted out.
        kept_by_hooks: LEAF: tensors in it that they store.
        unseen: LEAF: attributes that these have set, and that make no difference to it.
        is_of_hook: a forward hook that is lifted out of a module makes the call.
        writes: CALL: it writes to what lies on one rank.
        refusal: why it can be made only in a module that stays whole; else "".
        grown: LEAF: what it puts into containers, until its microbatch is over.
        taken: LEAF: containers out of which code outside has taken what it had put there.
        left: LEAF: the tensors that it puts into containers of its own.
        borrowed: LEAF: tensors of the step that it reads and is not given: others have kept them.
        found: LEAF: those that it finds in objects with state and computes with, with a gradient.
        lent: LEAF: where it finds tensors that are lent to it, and templates of what is there.
        held: the objects with state that it is given, and what is in them then.
        effects: and what it leaves in them.
        question, answer: QUESTION: what is asked, and the answer that leads here.
        where: who calls, for messages.
        following: what comes next, one way or another.
        way: END: the whole way.
    """

    kind: EntryKind
    target: Any = None
    name: str = ""
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    settings: Settings | None = None
    modules: tuple[nn.Module, ...] = ()
    flags: tuple[bool, ...] = ()
    frozen: Frozen = ()
    result: Any = None
    is_fixed: bool = True
    outputs: list[tuple[Path, torch.Tensor]] = field(default_factory=list)
    changed: list[torch.Tensor] = field(default_factory=list)
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    repeats: bool = False
    draw: tuple[str, int, int] | None = None
    draws: bool | None = False
    work: Work = field(default_factory=Work)
    region: Region | None = None
    recomputes: bool = False
    inner: dict[int, tuple[Tap, torch.Tensor]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    hidden: list[tuple[Any, str, Any]] = field(default_factory=list)
    stateful: dict[nn.Module, set[str]] = field(default_factory=dict)
    asks: bool = False
    decides: bool = False
    runs_backward: bool = False
    checkpoints: bool = False
    shown: dict[Path, frozenset[tuple[nn.Module, str]]] = field(default_factory=dict)
    kept: frozenset[Path] = frozenset()
    reached: frozenset[tuple[nn.Module, str]] = frozenset()
    in_turn: str = ""
    sees_backward: bool = False
    rewrites: bool = False
    seen: Seen = Seen.NOTHING
    hooked: list[HookedCall] = field(default_factory=list)
    lifted: set[nn.Module] = field(default_factory=set)
    lifts: bool = False
    hooks: Signature = ()
    hook_calls: list[HookCall] = field(default_factory=list)
    kept_by_hooks: list[torch.Tensor] = field(default_factory=list)
    unseen: set[tuple[nn.Module, str]] = field(default_factory=set)
    is_of_hook: bool = False
    writes: bool = False
    refusal: str = ""
    grown: list[Growth] = field(default_factory=list)
    taken: list[Any] = field(default_factory=list)
    left: list[Growth] = field(default_factory=list)
    borrowed: list[torch.Tensor] = field(default_factory=list)
    found: list[torch.Tensor] = field(default_factory=list)
    lent: list[tuple[Spot, Any]] = field(default_factory=list)
    held: list[tuple[Carried, Any]] = field(default_factory=list)
    effects: list[tuple[Carried, Effects]] = field(default_factory=list)
    question: Question | None = None
    answer: Any = None
    where: str = ""
    following: list[Entry] = field(default_factory=list)
    way: Way | None = None

    def note_taken(self) -> None:
        """Notes which containers have no more what the leaf has put there."""
        for growth in self.grown:
            if growth.is_gone and not any(each is growth.obj for each in self.taken):
                self.taken.append(growth.obj)
        self.grown = []

    @property
    def given_to_hooks(self) -> list[torch.Tensor]:
        """The tensors that hooks which are lifted out of a leaf are given."""
        return tensors_in([(call.args, call.kwargs) for call in self.hook_calls])

    def __str__(self) -> str:
        return f"{self.name} in {self.where}" if self.where else self.name or "the end"


@dataclass(eq=False)
class Way:
    """A way that has been gone to its end.

    Attributes:
        number: among those of its step function, in the order of discovery.
        entries: all of them.
        graph: what it computes.
        plan: of the graph, cut; None while that is not done.
        moves: what it changes that later microbatches may see; None while nobody has asked.
        fakes: all that its entries give.
        counts: how often each of them is held.
        values: by the identity of a fake, the value of the graph that it stands for in the end.
        stored: where code between modules stores fakes that outlive the microbatch.
    """

    number: int
    entries: Sequence[Entry]
    graph: Graph
    plan: Any = None
    moves: Any = None
    fakes: list[torch.Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    stored: list[Stored] = field(default_factory=list)


class Trace:
    """The tree for microbatches whose tensor arguments are alike.

    Args:
        inputs: fakes of the tensor arguments.

    Attributes:
        start: of all ways.
        metadata: for fakes that some entry changes the looks of, how they look at first.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs = inputs
        self.start = Entry(EntryKind.START, name="the start of the step function")
        self.metadata: dict[int, tuple[torch.Tensor, TensorSpec]] = {}

    def note_change(self, tensor: torch.Tensor, before: TensorSpec) -> bool:
        """Takes note if a call has changed the looks of a fake; returns whether it has."""
        if not isinstance(tensor, FakeTensor) or TensorSpec.of(tensor) == before:
            return False
        self.metadata.setdefault(id(tensor), (tensor, before))
        return True

    def first_spec(self, tensor: torch.Tensor) -> TensorSpec:
        """Returns how a fake looks before any call has changed that."""
        known = self.metadata.get(id(tensor))
        return TensorSpec.of(tensor) if known is None else known[1]

    def put_back(self) -> None:
        """Gives fakes the looks that they have at the start of a way, where autograd lets it.

        A view of a tensor that was written to cannot forget that, and then the tensor must not.
        """
        shown = {storage_of(each) for each, _ in self.metadata.values() if each._is_view()}
        for tensor, spec in self.metadata.values():
            spec.give(tensor, forgets=storage_of(tensor) not in shown)
