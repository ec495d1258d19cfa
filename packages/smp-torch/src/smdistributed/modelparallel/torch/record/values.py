"""What the tensors of a run on fakes stand for in the graph that is written."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private import FakeTensor, past_recording, storage_of
from smdistributed.modelparallel.torch.record.carried import Carried
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.leaf_memory import LeafMemory
from smdistributed.modelparallel.torch.record.nested import template
from smdistributed.modelparallel.torch.record.replicated import evaluate_replicated, sources
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.taps import Tap


class Values:
    """Writes the graph: its nodes, and the value that each tensor stands for.

    Args:
        models: whose parameters and buffers are values too.
        state: where the run is.
        memory: of leaves; one that lets a tensor escape is no longer remembered.
        where: names the place where the run is, for messages.

    Attributes:
        graph: that is written at present; inside a leaf one of its own.
    """

    def __init__(
        self,
        models: Sequence[FakeModel],
        state: RunState,
        memory: LeafMemory | None,
        where: Callable[[], str],
    ) -> None:
        self.graph = Graph()
        self._state = state
        self._memory = memory
        self._where = where
        self._known: dict[int, Value] = {}
        self._sharing: dict[int, list[Value]] = collections.defaultdict(list)
        # Identities above are only good while the tensors live.
        self._alive: list[torch.Tensor] = []
        self._slots = {
            id(fake): (model, slot) for model in models for slot, fake in model.slots.items()
        }
        #: Fakes that a leaf made and did not return -> where a replay finds them.
        self._escaped: dict[int, tuple[Node, Tap, torch.Tensor]] = {}
        self._carried: dict[int, tuple[Carried, Any]] = {}

    # ------------------------------------------------------------------ writing

    def node(self, kind: NodeKind, target: Any, name: str, **facts: Any) -> Node:
        """Appends a node."""
        index = len(self.graph.nodes)
        return self.graph.add(Node(index, kind, target, name, region=self._state.region, **facts))

    def bind(self, tensor: torch.Tensor, node: Node, source: Any) -> Value:
        """Makes the value of one tensor of a node's result."""
        value = self.graph.bind(tensor, node, source)
        self._known[id(tensor)] = value
        self._alive.append(tensor)
        self._sharing[storage_of(tensor)].append(value)
        return value

    def change(self, node: Node, changed: Sequence[torch.Tensor]) -> dict[int, Value]:
        """Notes that a node changes tensors in place.

        Returns:
            by the id of each tensor, the value that it stood for before.
        """
        before = {id(tensor): self._known[id(tensor)] for tensor in changed}
        for tensor in {id(tensor): tensor for tensor in changed}.values():
            old = before[id(tensor)]
            node.aliases += [
                value for value in self._sharing[storage_of(tensor)] if value is not old
            ]
            node.changes.append(old)
            for value in (old, *node.aliases):
                value.is_changed = True
        return before

    @contextlib.contextmanager
    def aside(self) -> Iterator[Graph]:
        """Writes a graph of its own meanwhile, and forgets it."""
        graph, known = self.graph, self._known
        self.graph, self._known = Graph(), dict(known)
        try:
            yield self.graph
        finally:
            self.graph, self._known = graph, known

    def note_escape(self, tensor: torch.Tensor, node: Node, tap: Tap, *, again: bool) -> None:
        """Remembers where a replay finds a tensor that a leaf made besides its result.

        Args:
            tensor: the fake.
            node: the call of the leaf.
            tap: where.
            again: whether this place is taken if another is known already.
        """
        if again or id(tensor) not in self._escaped:
            self._escaped[id(tensor)] = node, tap, tensor

    # ------------------------------------------------------------------ reading

    def of(self, tensor: torch.Tensor) -> Value:
        """Returns the value that a tensor of the run stands for.

        Raises:
            UnsupportedError: no recorded call made it.
        """
        known = self._known.get(id(tensor))
        if known is not None:
            return known
        if id(tensor) in self._slots:
            return self._of_slot(tensor)
        constant = tensor
        if isinstance(tensor, FakeTensor):
            if tensor.constant is None:
                return self._of_stranger(tensor)
            constant = tensor.constant
        node = self.node(NodeKind.CONSTANT, constant, _constant_text(constant), replicated=True)
        return self.bind(tensor, node, ())

    def _of_slot(self, tensor: torch.Tensor) -> Value:
        model, slot = self._slots[id(tensor)]
        # A parameter lives on one rank; buffers are everywhere.
        replicated = not isinstance(tensor, nn.Parameter)
        node = self.node(NodeKind.ATTRIBUTE, slot, model.slot_name(slot), replicated=replicated)
        return self.bind(tensor, node, ())

    def _of_stranger(self, tensor: torch.Tensor) -> Value:
        escaped = self._escaped.get(id(tensor))
        if escaped is not None and not self._state.leaf_depth:
            node, tap, _ = escaped
            if self._memory is not None:
                self._memory.forget(node.target)
            node.taps.append(tap)
            return self.bind(tensor, node, tap)
        if not self._state.is_glue:
            return self.bind(tensor, self.node(NodeKind.CALL, None, "unknown"), ())
        raise UnsupportedError(
            f"a tensor of shape {tuple(tensor.shape)} appeared that no recorded call "
            f"made, in {self._where()}: a hook, an attribute or a compiled function "
            "carried it out of a module that is executed as a whole. Return it from that "
            "module's forward, or put the modules that use it on one partition."
        )

    def tensor_of(self, value: Value) -> torch.Tensor:
        """Returns a tensor of the run that stands for a value."""
        return next(tensor for tensor in self._alive if self._known.get(id(tensor)) is value)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for one that is the same in every microbatch; else None."""
        value = self.of(tensor)
        if not value.replicated or any(node.kind is NodeKind.INPUT for node in sources([value])):
            return None
        with past_recording():
            real: torch.Tensor = evaluate_replicated(lambda tensor: tensor, (value,), {}, ())
        return real

    # ------------------------------------------------------------------ arguments

    def template(self, obj: Any, where: str) -> Any:
        """Returns ``obj`` with its tensors replaced by values, and objects with state by stand-ins.

        Args:
            obj: arguments of a call.
            where: the call, for messages.
        """

        def carry(obj: Any) -> Any:
            if not self._state.is_glue:
                return obj
            if id(obj) not in self._carried:
                carried = Carried(len(self._carried), obj, self.constant, where)
                self._carried[id(obj)] = carried, obj
            return self._carried[id(obj)][0]

        return template(obj, self.of, carry)

    def template_of_carried(self, obj: Any) -> Any:
        """Returns ``obj`` with its tensors, and stand-ins for the objects with state in it."""
        return template(obj, lambda tensor: tensor, lambda obj: self._carried[id(obj)][0])


def _constant_text(tensor: torch.Tensor) -> str:
    """Names a constant, so that ranks which have different ones find out."""
    with past_recording():
        value = f" {tensor.tolist()}" if tensor.numel() == 1 and not tensor.is_meta else ""
        return f"constant {tuple(tensor.shape)} {tensor.dtype}{value}"
