"""From a row of entries to a graph: what the tensors of a run on fakes stand for."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, past_recording
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.data import put_data
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import (
    Graph,
    HookedGradient,
    Node,
    NodeKind,
    Value,
)
from smdistributed.modelparallel.torch.record.leaves.copies import RankCopies
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.early_gradients import (
    Differentiated,
    EarlyGradients,
    computes_on,
    reached_from,
)
from smdistributed.modelparallel.torch.record.trace.replicated import evaluate_replicated, sources
from smdistributed.modelparallel.torch.record.trace.taps import Function, Tap
from smdistributed.modelparallel.torch.record.trace.tree import (
    Constant,
    Entry,
    EntryKind,
    Seen,
    Trace,
)
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.tensors.functions import (
    DIFFERENTIATING,
    SWITCHING_GRADIENTS,
)
from smdistributed.modelparallel.torch.tensors.nested import (
    Path,
    placeholders,
    retemplate,
)
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec
from smdistributed.modelparallel.torch.tensors.structure import structure_of

_NODE_KINDS = {
    EntryKind.CALL: NodeKind.CALL,
    EntryKind.QUESTION: NodeKind.CALL,
    EntryKind.NUMBER: NodeKind.CALL,
    EntryKind.LEAF: NodeKind.LEAF,
}
_OF_GRADIENTS = (EntryKind.WATCHED, EntryKind.GRADIENT, EntryKind.HOOKED)


class Values:
    """Writes a graph, entry by entry.

    Args:
        scene: the models, whose parameters and buffers are values too.
        state: where the run is.
        trace: of the run.
        where: names the place where the run is, for messages.
        changed: buffers of split modules that the microbatch changes: one rank has them.

    Attributes:
        graph: that is written at present; inside a leaf one of its own.
        copies: of objects with state, as each rank has them now.
        read: what calls have read that no recorded call made; inside a leaf by its calls.
        borrowed: inside a leaf, what its calls have read of that code outside of it has made, and
            the parameters and buffers.
        written: inside a leaf, what its calls have changed in place.
        made: inside a leaf, its calls.
        models: those whose parameters or buffers were read.
    """

    def __init__(
        self,
        scene: Scene,
        state: RunState,
        trace: Trace,
        where: Callable[[], str],
        changed: Container[Slot] = (),
    ) -> None:
        self.graph = Graph()
        self.copies = RankCopies()
        self.read: list[torch.Tensor | Constant] = []
        self.borrowed: dict[int, torch.Tensor] = {}
        self.written: list[torch.Tensor] = []
        self.made: list[Entry] = []
        self._outside: dict[int, Value] = {}
        self.models: set[nn.Module] = set()
        self._scene = scene
        self._state = state
        self._where = where
        self._changed = changed
        self._known: dict[int, Value] = {}
        self._constants: dict[Constant, Value] = {}
        #: By memory, the tensors that lie in it, with a value that each has stood for.
        self._sharing: dict[int, list[tuple[torch.Tensor, Value]]] = collections.defaultdict(list)
        # Identities above are only good while the tensors live.
        self._alive: list[torch.Tensor] = []
        #: Fakes that a leaf made and did not return -> where a replay finds them.
        self._escaped: dict[int, tuple[Node, Entry, Tap, torch.Tensor]] = {}
        self._trace = trace
        #: By the activation, the gradients whose hooks run at present.
        self._hooked: dict[Value, Value] = {}
        self._early = EarlyGradients(self.graph)
        #: Views of gradients that another backward pass has added to.
        self._outdated: set[int] = set()
        self._inputs: list[tuple[torch.Tensor, Value]] = []
        for position, fake in enumerate(trace.inputs):
            node = self._node(NodeKind.INPUT, position, f"input {position}", replicated=True)
            self._inputs.append((fake, self._bind(fake, node, ())))

    def known(self) -> dict[int, Value]:
        """Returns by the identity of a tensor what it stands for."""
        return dict(self._known)

    @property
    def num_inputs(self) -> int:
        """How many tensor arguments the microbatch has."""
        return len(self._inputs)

    # ------------------------------------------------------------------ writing

    def take(self, entry: Entry) -> None:
        """Writes what an entry computes; nothing if it computes no tensor."""
        if entry.kind is EntryKind.BACKWARD:
            self._take_root(entry)
            return
        if entry.kind in _OF_GRADIENTS:
            self._take_gradient(entry)
            return
        if entry.refusal and self._state.is_glue:
            raise UnsupportedError(entry.refusal)
        if not entry.outputs and not entry.changed and entry.kind is not EntryKind.LEAF:
            return
        if self._state.is_glue:
            self._check_borrowed(entry)
            self.copies.look_at(entry)
        settings = entry.settings
        assert settings is not None
        if self._state.is_glue:
            if settings.saves_otherwise:
                raise UnsupportedError(
                    f"{entry} is called inside torch.autograd.graph.saved_tensors_hooks, or "
                    "save_on_cpu, which reach no other process. Put the context into the forward "
                    "of one module, or around the whole call of the step function."
                )
            for carried in placeholders((entry.args, entry.kwargs), Carried):
                if carried.problem is not None:
                    raise carried.problem
        if self._state.leaf_depth:
            self.made.append(entry)
        args, kwargs = self.arguments(entry.args), self.arguments(entry.kwargs)
        lent = [(spot, self.arguments(content)) for spot, content in entry.lent]
        kind = _NODE_KINDS[entry.kind]
        inputs = list(placeholders((args, kwargs), Value))
        if self._state.is_glue and not self._hooked:
            self._bring_forward(entry, [*inputs, *placeholders([e for _, e in lent], Value)])
        if kind is NodeKind.CALL and not inputs:
            kwargs |= _default_device(entry.outputs, kwargs)
        replicated = (
            kind is NodeKind.CALL
            and entry.draw is None
            and all(value.replicated for value in inputs)
            and not any(
                entry.specs[id(tensor)].requires_grad
                for tensor in (*(each for _, each in entry.outputs), *entry.changed)
            )
        )
        before = {id(tensor): self._known[id(tensor)] for tensor in entry.changed}
        late = any(value.node.late for value in inputs) or (bool(self._hooked) and not replicated)
        if late and self._state.is_glue and not _can_be_late(entry, list(before.values())):
            raise computes_on(entry.name, "a hook on a gradient computes it")
        node = self._node(
            kind,
            torch.Tensor.detach if entry.kind is EntryKind.NUMBER else entry.target,
            entry.name,
            where=entry.where,
            args=args,
            kwargs=kwargs,
            lent=lent,
            grad_enabled=settings.grad_enabled,
            autocast=settings.autocast,
            switches=settings.switches,
            default_dtype=settings.default_dtype,
            modules=entry.modules,
            flags=entry.flags,
            frozen=entry.frozen,
            draw=entry.draw,
            draws=entry.draws if entry.draw is None else True,
            region=entry.region,
            work=entry.work,
            stateful=entry.stateful,
            decides=entry.decides,
            in_turn=entry.in_turn,
            rewrites=entry.rewrites,
            shown=dict[Any, Any](entry.shown),
            kept=entry.kept,
            # In one order on all ranks, which compare what they refuse.
            reached={
                slot: slot[0] in self._scene.leaf_of
                for slot in sorted(entry.reached, key=self._scene.slot_name)
            },
            found=tuple(dict.fromkeys(node for each in entry.found if (node := self._maker(each)))),
            effects=entry.effects,
            lifted=tuple(each for each in entry.modules if each in entry.lifted),
            lifts=entry.lifts,
            outside=tuple({spot: None for spot, is_lifted in entry.hooks if is_lifted}),
            taken=entry.taken,
            adds=entry.seen is Seen.ALL or bool(entry.left),
            structure=_structure(entry),
            replicated=replicated,
            late=late,
        )
        if entry.effects and self._state.is_glue and self._scene.leaves:
            self.copies.note(entry, self._scene.leaves[entry.target].partition)
        if entry.runs_backward:
            self._early.with_code.add(node)
        for key, (tap, tensor) in entry.inner.items():
            if entry.decides and isinstance(tap.module, Function):
                continue  # other numbers have it make other calls
            if tap.call is not None or key not in self._escaped:
                self._escaped[key] = node, entry, tap, tensor
        made: list[tuple[torch.Tensor, Any]] = [(tensor, path) for path, tensor in entry.outputs]
        made += [(tensor, before[id(tensor)]) for tensor in entry.changed]
        if kind is NodeKind.CALL:
            node.shows = self._on_one(tensor for _, tensor in entry.outputs)
        if entry.target is put_data:
            node.parted = self._parted(entry)
        made += self._change(node, entry)
        if late and self._state.is_glue and len(self.sharing(entry.changed)) > len(before):
            raise UnsupportedError(
                f"{entry} writes to a part of the gradient of an activation, by a view, while a "
                "pipelined step runs. Write to the gradient itself (gradient[:, 0] = 0), or "
                "return a new one."
            )
        # What lies on one rank stays what it is there, with other numbers.
        bound = set(map(id, self._written_in_place(entry)))
        entry.writes = bool(bound)
        for tensor, source in made:
            if id(tensor) not in bound:
                bound.add(id(tensor))
                self._bind(tensor, node, source, entry.specs[id(tensor)])

        if self._state.is_glue:
            for tensor in entry.kept_by_hooks:
                self.of(tensor)

    def _take_root(self, entry: Entry) -> None:
        root = self.of(entry.args[0])
        if root.node.late and self._state.is_glue:
            if self._hooked:
                raise computes_on("model.backward")
            self._early.bring_forward([root], "model.backward")
        self.graph.roots.append(root)

    def _bring_forward(self, entry: Entry, inputs: Sequence[Value]) -> None:
        """Has gradients computed now that a call cannot wait for."""
        changed = [self._known[id(tensor)] for tensor in entry.changed]
        wanted = [value for value in (*inputs, *changed) if value.node.late]
        if wanted and not _can_be_late(entry, changed):
            self._early.bring_forward(wanted, entry.name)

    def settle_gradients(self, returned: Any) -> None:
        """Sees to the gradients that nothing but the end of the microbatch needs.

        Args:
            returned: a template of what it gives.
        """
        self._early.settle(list(placeholders(returned, Value)))

    def _take_gradient(self, entry: Entry) -> None:
        """Writes that the gradient of an activation arrives, or what its hooks have made of it."""
        if entry.kind is EntryKind.GRADIENT and not entry.outputs:
            return
        if self._state.is_glue and not self._is_known(entry.args[0]):
            return  # it is within a leaf, and nobody may use its gradient
        activation = self.of(entry.args[0])
        if entry.kind is EntryKind.GRADIENT:
            ((path, tensor),) = entry.outputs
            node = self._node(NodeKind.GRADIENT, None, entry.name, args=(activation,), late=True)
            given = self._bind(tensor, node, path, entry.specs[id(tensor)])
            _, roots, starts, former = entry.args
            of = Differentiated(*map(self.arguments, (roots, starts)))
            self._early.note(node, of)
            if former is None:
                self._hooked[activation] = given
            else:
                self.graph.gradients.append(HookedGradient(activation, given, given))
                self._add_to(former, given, entry)
        elif entry.kind is EntryKind.HOOKED:
            given, final = self._hooked.pop(activation), self.of(entry.args[1])
            self.graph.gradients.append(HookedGradient(activation, given, final))

    def _add_to(self, gradient: torch.Tensor, more: Value, entry: Entry) -> None:
        """Writes that a backward pass adds to the gradient that a tensor has."""
        args = self.of(gradient), more
        node = self._node(NodeKind.CALL, torch.add, "add", args=args, late=True)
        spec = entry.specs[id(entry.outputs[0][1])]
        for other, _ in self._sharing[storage_of(gradient)]:
            if other is not gradient:
                self._outdated.add(id(other))
        self._bind(gradient, node, (), spec)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known or id(tensor) in self._escaped

    def _check_borrowed(self, entry: Entry) -> None:
        """Makes sure that a leaf runs where what it reads besides its arguments was kept.

        Raises:
            UnsupportedError: another rank has kept it.
        """
        lent = {id(e) for _, each in entry.lent for e in placeholders(each, torch.Tensor)}
        for tensor in entry.borrowed:
            if id(tensor) in lent:
                continue
            maker = self._maker(tensor)
            if maker is None:
                continue
            home = self._scene.leaves.get(maker.target) if maker.kind is NodeKind.LEAF else None
            if home is None or home.partition != self._scene.leaves[entry.target].partition:
                raise UnsupportedError(
                    f"{entry.name} reads a tensor of the step that it is not given: "
                    f"{maker.name or 'the model'} has left it in an attribute, a container or a "
                    "closure, in another process. Pass it as an argument, read it in code between "
                    "modules, or put the modules on one partition."
                )

    def _maker(self, tensor: torch.Tensor) -> Node | None:
        """Returns the node that has made a tensor; None if it is not known."""
        value, escaped = self._known.get(id(tensor)), self._escaped.get(id(tensor))
        if value is not None:
            return value.node
        return None if escaped is None else escaped[0]

    def _node(self, kind: NodeKind, target: Any, name: str, **facts: Any) -> Node:
        return self.graph.add(Node(len(self.graph.nodes), kind, target, name, **facts))

    def _bind(
        self, tensor: torch.Tensor, node: Node, source: Any, spec: TensorSpec | None = None
    ) -> Value:
        """Makes the value of one tensor of a node's result; None: it looks as at first."""
        spec = self._trace.first_spec(tensor) if spec is None else spec
        value = self.graph.bind(tensor, node, source, spec)
        self._known[id(tensor)] = value
        self._alive.append(tensor)
        if tensor.layout is torch.strided:
            self._sharing[storage_of(tensor)].append((tensor, value))
        elif self._state.is_glue:
            raise UnsupportedError(
                f"{node.name} gives a tensor of layout {tensor.layout}, in code between modules: "
                "only dense tensors go from one partition to another. Make and use sparse ones "
                "inside one module that stays whole."
            )
        return value

    def _change(self, node: Node, entry: Entry) -> list[tuple[torch.Tensor, Value]]:
        """Notes that a node changes tensors in place.

        Returns:
            the other tensors that show the change and are computed again wherever they are read,
            with the values that they stood for.
        """
        seen = []
        self.written += entry.changed
        for tensor in {id(tensor): tensor for tensor in entry.changed}.values():
            old = self._known[id(tensor)]
            sharing = [each for each in self._sharing[storage_of(tensor)] if each[1] is not old]
            node.aliases += [value for _, value in sharing]
            if self._state.is_glue:
                _check_shown(entry, (old, *node.aliases))
            node.changes.append(old)
            for value in (old, *node.aliases):
                value.is_changed = True
            for other, value in sharing:
                if self._known.get(id(other)) is not value:
                    continue
                if value.replicated:
                    seen.append((other, value))
                else:
                    # Whoever is on another partition reads it when the segment is over.
                    value.requires_grad |= entry.specs[id(other)].requires_grad
        return seen

    def _written_in_place(self, entry: Entry) -> list[torch.Tensor]:
        """Returns the tensors in the memory of parameters that a call between modules writes to."""
        if entry.kind is not EntryKind.CALL or entry.repeats or self._state.leaf_depth:
            return []
        return [tensor for tensor in entry.changed if self._on_one([tensor])]

    def _on_one(self, tensors: Iterable[torch.Tensor]) -> frozenset[Slot]:
        """Returns what lies on one rank alone, in whose memory tensors are."""
        slots = map(self._scene.slots_in, tensors)
        return frozenset().union(*slots) & self._scene.on_one

    def _parted(self, entry: Entry) -> list[Value]:
        """Returns what shares memory before an assignment to ``.data``, or behind it.

        Raises:
            UnsupportedError: the data may be another's, who keeps it.
        """
        parameter, data = entry.args
        shared = self._sharing[storage_of(data)] if isinstance(data, FakeTensor) else ()
        if self._state.is_glue and not (
            shared and all(value.node.kind is NodeKind.CALL for _, value in shared)
        ):
            raise UnsupportedError(
                f"{entry} was given a tensor that others have too (an argument of the step, a "
                "result of a module, a constant), while a pipelined step runs: ranks would not see "
                "what becomes of it. Assign a copy (x.clone())."
            )
        former = self._sharing[storage_of(parameter)]
        return [value for each, value in (*former, *shared) if each is not parameter]

    def sharing(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns tensors and all others that lie in the same memory."""
        found = {id(tensor): tensor for tensor in tensors}
        for tensor in list(found.values()):
            if tensor.layout is torch.strided:
                found.update((id(each), each) for each, _ in self._sharing[storage_of(tensor)])
        return list(found.values())

    @contextlib.contextmanager
    def aside(self) -> Iterator[Graph]:
        """Writes a graph of its own meanwhile, and forgets it."""
        graph, known, constants, read = self.graph, self._known, self._constants, self.read
        outside, borrowed, written = self._outside, self.borrowed, self.written
        made, self.made = self.made, []
        self.graph, self._known, self._constants = Graph(), dict(known), dict(constants)
        self.read, self._outside, self.borrowed, self.written = [], known, {}, []
        self.graph.constants = list(graph.constants)
        try:
            yield self.graph
        finally:
            self.graph, self._known, self._constants, self.read = graph, known, constants, read
            self._outside, self.borrowed, self.written = outside, borrowed, written
            self.made = made

    def text_of(self, entries: Iterable[Entry], returned: Iterable[torch.Tensor]) -> list[str]:
        """Returns what entries do and what code returns of it, as ``text`` says it.

        What they have made is not known afterwards.
        """
        sharing = {memory: [*seen] for memory, seen in self._sharing.items()}
        escaped = dict(self._escaped)
        try:
            with self.aside() as graph:
                for entry in entries:
                    self.take(entry)
                return self.text(graph, returned)
        finally:
            self._sharing.clear()
            self._sharing.update(sharing)
            self._escaped = escaped

    def text(self, graph: Graph, returned: Iterable[torch.Tensor]) -> list[str]:
        """Returns what a graph does and what code returns of it, as text.

        Two leaves whose texts are equal have computed the same from the same tensors.
        """

        def name(value: Value) -> str:
            nodes, index = graph.nodes, value.node.index
            is_own = index < len(nodes) and nodes[index] is value.node
            return repr(value) if is_own else f"outer {value!r}"

        given = [self.of(each) for each in returned]
        return [*(node.line(name) for node in graph.nodes), *map(name, given)]

    # ------------------------------------------------------------------ reading

    def written_inputs(self) -> dict[int, Value]:
        """Returns what the arguments that were changed in place have become, by position."""
        return {
            position: self._known[id(fake)]
            for position, (fake, given) in enumerate(self._inputs)
            if given.is_changed
        }

    def arguments(self, template: Any) -> Any:
        """Returns a template with values in the places of fakes and constants."""
        return retemplate(template, (torch.Tensor, Constant), self.of)

    def activations_of(self, root: torch.Tensor) -> Iterator[Value]:
        """Yields the values that the gradient of a tensor comes to, in the order in which it does.

        Autograd takes what was made last first. What is within a leaf is part of its gradient.
        """

        def moment(value: Value) -> tuple[int, bool, int]:
            return value.node.index, not isinstance(value.source, Tap), value.index

        yield from sorted(reached_from([self.of(root)]), key=moment, reverse=True)

    def may_reach(self, tensor: torch.Tensor, root: torch.Tensor) -> bool:
        """Whether the gradient of a root comes to a tensor, as far as the way is known."""
        reached = reached_from([self.of(root)])
        return self.of(tensor) in reached or any(_is_unknown(value.node) for value in reached)

    def is_from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether code outside of the leaf that runs has made a tensor of the step."""
        return id(tensor) in self._outside or id(tensor) in self._escaped

    def is_stranger(self, tensor: torch.Tensor) -> bool:
        """Whether no recorded call made a fake."""
        return (
            isinstance(tensor, FakeTensor)
            and tensor.constant is None
            and id(tensor) not in self._known
            and id(tensor) not in self._scene.slots
        )

    def of(self, tensor: torch.Tensor | Constant) -> Value:
        """Returns the value that a tensor of the run stands for.

        Raises:
            UnsupportedError: no recorded call made it.
        """
        if isinstance(tensor, Constant):
            return self._of_constant(tensor)
        if id(tensor) in self._outdated:
            raise UnsupportedError(
                f"{self._where()} computes with a view of a gradient (x.grad.data, x.grad[0]) to "
                "which another model.backward of the same pipelined step has added since. Take "
                "x.grad anew, or a copy before (x.grad.clone())."
            )
        known = self._known.get(id(tensor))
        if known is not None:
            if id(tensor) in self._outside:
                self.borrowed[id(tensor)] = tensor
            return known
        if id(tensor) in self._scene.slots:
            return self._of_slot(tensor)
        made = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        self.read.append(tensor if made is None else made)
        if made is None:
            return self._of_stranger(tensor)
        return self._bind(
            tensor, self._node(NodeKind.CONSTANT, made, _text(made), replicated=True), ()
        )

    def _of_constant(self, constant: Constant) -> Value:
        if constant not in self._constants:
            self.read.append(constant)
            node = self._node(
                NodeKind.CONSTANT,
                len(self._trace.inputs) + len(self.graph.constants),
                str(constant),
                replicated=True,
            )
            self.graph.constants.append(constant)
            self._constants[constant] = self.graph.bind(
                constant.tensor, node, (), TensorSpec.of(constant.tensor)
            )
        return self._constants[constant]

    def _of_slot(self, tensor: torch.Tensor) -> Value:
        model, slot = self._scene.slots[id(tensor)]
        self.models.add(model.model)
        self.borrowed[id(tensor)] = tensor
        # What is on every rank is of the same content as long as nothing in the step changes it.
        replicated = slot not in self._scene.on_one and slot not in self._changed
        node = self._node(NodeKind.ATTRIBUTE, slot, model.slot_name(slot), replicated=replicated)
        return self._bind(tensor, node, ())

    def _of_stranger(self, tensor: torch.Tensor) -> Value:
        escaped = self._escaped.get(id(tensor))
        if escaped is not None:
            self.borrowed[id(tensor)] = tensor
        if escaped is not None and not self._state.leaf_depth:
            node, entry, tap, _ = escaped
            node.taps.append(tap)
            if slots := self._scene.slots_in(tensor):
                node.shown[tap] = slots
            # Those that are lifted out carry it out in each microbatch.
            is_carried = any(each is tensor for each in entry.given_to_hooks)
            if isinstance(tap.module, Function) and not is_carried:
                entry.seen = Seen.ALL  # hooks that compute give other tensors each time
            elif tap.call is not None and entry.seen is Seen.NOTHING and not is_carried:
                entry.seen = Seen.HOOKS if entry.hooked else Seen.ALL
            return self._bind(tensor, node, tap)
        if not self._state.is_glue:
            name = "unknown" if escaped is None else f"%{escaped[0].index} {escaped[2]}"
            return self._bind(tensor, self._node(NodeKind.CALL, None, name), ())
        raise UnsupportedError(
            f"a tensor of shape {tuple(tensor.shape)} appeared that no recorded call "
            f"made, in {self._where()}: a hook, an attribute or a compiled function "
            "carried it out of a module that is executed as a whole. Return it from that "
            "module's forward, or put the modules that use it on one partition."
        )

    def first_spec(self, tensor: torch.Tensor) -> TensorSpec:
        """Returns how a tensor looks before any call has changed that."""
        return self._trace.first_spec(tensor)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for one that is the same in every microbatch; else None."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = self.of(tensor)
        if not value.replicated or any(
            node.kind is NodeKind.INPUT or isinstance(node.target, int) for node in sources([value])
        ):
            return None
        with past_recording():
            real: torch.Tensor = evaluate_replicated(
                lambda tensor: tensor, (value,), {}, (), attribute=self._scene.real_of
            )
        return real


def _is_unknown(node: Node) -> bool:
    """Whether it is not known what a tensor is made of, by a module that decides by numbers."""
    return node.kind is NodeKind.CALL and node.target is None


def _can_be_late(entry: Entry, changed: Sequence[Value]) -> bool:
    """Whether a call that computes from gradients can be made behind the backward pass."""
    return (
        entry.kind is not EntryKind.LEAF
        and entry.target not in DIFFERENTIATING | SWITCHING_GRADIENTS
        and entry.draw is None
        and all(value.node.late for value in changed)
    )


def _default_device(
    outputs: Sequence[tuple[Path, torch.Tensor]], kwargs: dict[str, Any]
) -> dict[str, torch.device]:
    """Returns the device of a new tensor that was not asked for: torch's default at the time.

    Replays, and evaluations past all function modes, must not depend on ``set_default_device``.
    """
    devices = {tensor.device for _, tensor in outputs if tensor.device.type != "cpu"}
    if "device" in kwargs or len(devices) != 1:
        return {}
    return {"device": devices.pop()}


def _text(tensor: torch.Tensor) -> str:
    """Names a tensor, so that ranks which have different ones find out."""
    with past_recording():
        value = f" {tensor.tolist()}" if tensor.numel() == 1 and not tensor.is_meta else ""
        return f"constant {tuple(tensor.shape)} {tensor.dtype}{value}"


def _check_shown(entry: Entry, written: Iterable[Value]) -> None:
    """Refuses writes to what a leaf has shown of what it keeps: other code gets a copy of that."""
    for value in written:
        if value.node.kind is NodeKind.LEAF and value.source in value.node.shown:
            raise UnsupportedError(
                f"{entry} writes to what {value.node.name} has returned of a parameter, a buffer "
                "or an attribute of its own, which may lie on another partition. Write to a copy "
                "(x = x.clone()), or inside that module."
            )


def _structure(entry: Entry) -> Any:
    """Returns the structure of what a leaf returns; None for a tensor alone, and other calls."""
    if entry.kind is not EntryKind.LEAF or isinstance(entry.result, torch.Tensor):
        return None
    return structure_of(entry.result)
