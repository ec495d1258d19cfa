"""Computing activations ahead of a step, for the questions that its Python asks about them.

All ranks of the pipeline have come to the same question of the same microbatch. Each computes the
parts that lie on its partition, one after the other, and hands on what others need; the rank that
has what is asked about finds the answer, and all take it. What a part gives is kept for the next
question of the microbatch. An error of a part, or of the question, is raised on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.plan.parts import on_one_rank, part_giving, parts_between
from smdistributed.modelparallel.torch.plan.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.record.failure import Failure
from smdistributed.modelparallel.torch.record.ir import Graph, NodeKind, Value
from smdistributed.modelparallel.torch.record.questions.ahead import (
    changed_slots,
    depends_on_values,
)
from smdistributed.modelparallel.torch.record.questions.question import Question
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.state.carried import Carried, CarriedObjects
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.state.switches import without_autocast
from smdistributed.modelparallel.torch.trial.turns import keeps_state

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")


@dataclass
class _Part:
    """A part of what comes before a question.

    Attributes:
        nodes: what it computes.
        inputs: the values of the step's tensor arguments that it reads.
        program: computes it, on the rank that does.
    """

    nodes: SegmentNodes
    inputs: list[Value]
    program: Program | None


@dataclass
class _Ready:
    """What comes before a question, ready to run.

    Attributes:
        plan: of it.
        num_nodes: that are not of the question itself.
        digest: says what it computes, and where.
        parts: by the number of nodes that were computed already, what is left.
        last: gives what is asked about.
    """

    plan: Plan
    num_nodes: int
    digest: str
    last: _Part
    parts: dict[int, list[_Part]] = field(default_factory=dict)


class QuestionPlans:
    """The plans of what comes before questions, each made once.

    Args:
        runtime: the state of the library in this process.
        cut: cuts a graph along the partition.
    """

    def __init__(self, runtime: TorchRuntime, cut: Callable[[Graph], Plan]) -> None:
        self._runtime = runtime
        self._cut = cut
        #: Who has asked, as the log says once.
        self._places: set[str] = set()

    def ready(self, question: Question, *, placed: bool) -> _Ready:
        """Returns what comes before a question.

        Args:
            question: the question.
            placed: the models have their partitions.
        """
        before = question.before
        assert before is not None
        if before.ready is None:
            plan = self._cut(before.graph) if placed else on_one_rank(before.graph)
            digest = hashlib.sha256("\n".join(plan.lines()).encode()).hexdigest()
            last = self._part(plan, part_giving(plan, question.asked))
            before.ready = _Ready(plan, before.num_nodes, digest, last)
            self._tell(question.where)
        ready: _Ready = before.ready
        return ready

    def _tell(self, place: str) -> None:
        if place not in self._places and self._runtime.coordinates.pp_rank == 0:
            logger.warning(
                "%s asks for the value of an activation: in each microbatch what comes before it "
                "is computed once more, without gradients, before the step",
                place,
            )
        self._places.add(place)

    def parts(self, ready: _Ready, start: int, *, placed: bool) -> list[_Part]:
        """Returns what is left to compute before a question.

        Args:
            ready: what comes before it.
            start: how many nodes were computed for questions before.
            placed: the models have their partitions.
        """
        if start not in ready.parts:
            # Of models that have no partition yet no more than needed is copied to the device.
            singly = not placed and self._runtime.device.type != "cpu"
            parts = parts_between(ready.plan, start, ready.num_nodes, singly=singly)
            ready.parts[start] = [self._part(ready.plan, each) for each in parts]
        return ready.parts[start]

    def _part(self, plan: Plan, nodes: SegmentNodes) -> _Part:
        runtime = self._runtime
        inputs = [node.outputs[0] for node in nodes.nodes if node.kind is NodeKind.INPUT]
        program = None
        if nodes.rank == runtime.coordinates.pp_rank:
            program = Program(plan, nodes, runtime.device, runtime.random.drawing)
        return _Part(nodes, inputs, program)


class LookingAhead:
    """What is computed ahead of the step in one microbatch; see ``LookAhead``.

    Args:
        runtime: the state of the library in this process.
        plans: of what comes before questions.
        is_possible: what modules exchange with others is exchanged by these in a step alone.
    """

    def __init__(self, runtime: TorchRuntime, plans: QuestionPlans, *, is_possible: bool) -> None:
        self._runtime = runtime
        self._pp_rank = runtime.coordinates.pp_rank
        self._plans = plans
        self._shares = False
        self.is_possible = is_possible
        self._num_done = 0
        #: By the index of its value, what this rank has.
        self._tensors: dict[int, torch.Tensor] = {}
        #: The tensor arguments of the microbatch that it has.
        self._inputs: dict[int, torch.Tensor] = {}
        #: Values, and arguments, that a rank other than their own has got.
        self._handed: set[tuple[int, int]] = set()
        self._handed_inputs: set[tuple[int, int]] = set()

    def is_shared(self, question: Question) -> bool:
        """See ``LookAhead``.

        Raises:
            UnsupportedError: some of the models that it depends on have their partitions.
        """
        assert question.before is not None
        read = {
            node.target if node.kind is NodeKind.LEAF else node.target[0]
            for node in question.before.graph.nodes
            if node.kind in (NodeKind.LEAF, NodeKind.ATTRIBUTE)
        }
        placed = {
            model.holder.partitioned
            for model in models_of(self._runtime)
            if not read.isdisjoint(model.holder.fakes.names)
        }
        if len(placed) > 1:
            raise depends_on_values(question.where, "one of its models has no partition yet")
        return placed == {True}

    def answer(self, question: Question, given: Mapping[int, torch.Tensor]) -> Any:
        """Returns the answer to a question. Collective if it is shared: PP_GROUP.

        Raises:
            SMPError: the ranks ask different questions, or one has failed before.
            Exception: of a module, or of the question.
        """
        self._shares = self.is_shared(question)
        ready = self._begin(question)
        if self._pp_rank == 0:
            self._inputs = {n: given[n] for n in range(question.num_inputs)}
        for part in self._plans.parts(ready, self._num_done, placed=self._shares):
            self._compute(part, question, given)
        self._num_done = ready.num_nodes
        with self._failing_together() as found:
            tensors = self._run(ready.last, question, given)
            if tensors is not None:
                found.append(question.answer_of(tensors))
        return self._agreed(found, ready.last.nodes.rank)

    def decline(self, error: Exception) -> None:
        """Takes part in a question that this rank has not come to, for another reason.

        Raises:
            SMPError: on all ranks.
        """
        self._shares = True
        self._compare("", error)

    def _begin(self, question: Question) -> _Ready:
        try:
            ready = self._plans.ready(question, placed=self._shares)
        except Exception as error:
            self._compare("", error)
            raise
        self._compare(ready.digest, None)
        return ready

    def _compare(self, digest: str, error: Exception | None) -> None:
        if not self._shares:
            return
        failure = None if error is None else Failure.of(error)
        everyones = self._of_all((digest, failure))
        for _, each in everyones:
            if each is not None:
                raise each.error()
        if len({each for each, _ in everyones}) > 1:
            raise SMPError(
                "the ranks of the pipeline ask different questions about activations, or ask them "
                "after different computations. Every rank must run the same code with the same "
                "settings."
            )

    def _of_all(self, mine: Any) -> list[Any]:
        """Returns what the ranks of the pipeline have, all of which have come to the question."""
        runtime = self._runtime
        members = runtime.topology.members(CommGroup.PP_GROUP, runtime.rank)
        with runtime.communicator.reach.only(members, "in a question about an activation"):
            everyones: list[Any] = runtime.communicator.allgather(mine, CommGroup.PP_GROUP)
        return everyones

    def _compute(self, part: _Part, question: Question, given: Mapping[int, torch.Tensor]) -> None:
        """Computes a part on its rank; all ranks learn whether it could."""
        with self._failing_together() as found:
            tensors = self._run(part, question, given)
            if tensors is not None:
                self._tensors.update((value.index, each) for value, each in tensors.items())
        self._agreed(found, part.nodes.rank)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[list[Any]]:
        """Yields a list; an error is put there, to be raised by all."""
        found: list[Any] = []
        try:
            yield found
        except Exception as error:
            if not self._shares:
                raise
            found[:] = [Failure.of(error)]

    def _agreed(self, found: list[Any], rank: int) -> Any:
        """Returns what a rank has found; raises if one has failed."""
        everyones = [found]
        if self._shares:
            everyones = self._of_all(found)
        for each in everyones:
            if each and isinstance(each[0], Failure):
                raise each[0].error()
        own = everyones[rank] if self._shares else found
        return own[0] if own else None

    def _run(
        self, part: _Part, question: Question, given: Mapping[int, torch.Tensor]
    ) -> dict[Value, torch.Tensor] | None:
        """Hands a part what it reads; returns what it gives, on the rank that computes it."""
        self._hand(part)
        if part.program is None:
            return None
        inputs = [
            self._inputs.get(n) if n < question.num_inputs else given[n]
            for n in range(question.num_inputs + len(question.constants))
        ]
        arguments = [self._tensors[value.index] for value in part.nodes.inputs]
        carried = CarriedObjects(Carried.copy)
        devices = tuple(dict.fromkeys(("cpu", self._runtime.device.type)))
        with (
            without_autocast(devices),
            _state_kept(part.nodes, question.where),
            contextlib.nullcontext() if self._shares else self._on_device(part, question.where),
        ):
            results = part.program.run(inputs, carried, *arguments)
        return dict(zip(part.nodes.outputs, results, strict=True))

    @contextlib.contextmanager
    def _on_device(self, part: _Part, where: str) -> Iterator[None]:
        """Has copies of parameters on the device: those of models without a partition are not.

        Raises:
            UnsupportedError: they have no values yet.
        """
        replaced = []
        for table, name in _slots_of(part.nodes):
            tensor = table[name]
            if tensor is None:
                continue
            if tensor.is_meta:
                raise depends_on_values(where, "parameters of its model have no values yet")
            replaced.append((table, name, tensor))
            table[name] = tensor.detach().to(self._runtime.device)
        try:
            yield
        finally:
            for table, name, tensor in replaced:
                table[name] = tensor

    def _hand(self, part: _Part) -> None:
        """Sends a part what it reads and its rank has not."""
        rank = part.nodes.rank
        for value in part.inputs:
            position = value.node.target
            if rank and (position, rank) not in self._handed_inputs:
                self._handed_inputs.add((position, rank))
                self._pass_on(value, position, self._inputs, 0, rank)
        for value in part.nodes.inputs:
            if value.node.rank != rank and (value.index, rank) not in self._handed:
                self._handed.add((value.index, rank))
                self._pass_on(value, value.index, self._tensors, value.node.rank, rank)

    def _pass_on(
        self, value: Value, key: int, tensors: dict[int, torch.Tensor], source: int, target: int
    ) -> None:
        # By way of the host: a first question comes before ranks have connected their devices.
        links = self._runtime.links
        if self._pp_rank == source:
            links.send(value.wire(tensors[key].detach()).to(_HOST), target).wait()
        elif self._pp_rank == target:
            arrived = links.receive(value.wire_buffer(_HOST), source).wait()
            tensors[key] = value.from_wire(arrived).to(value.device)


def _slots_of(nodes: SegmentNodes) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields where nodes have parameters and buffers."""
    for node in nodes.nodes:
        if node.kind is NodeKind.LEAF:
            for module in node.modules:
                for table in (module._parameters, module._buffers):
                    yield from ((table, name) for name in table)
        elif node.kind is NodeKind.ATTRIBUTE:
            module, name = node.target
            yield module._parameters if name in module._parameters else module._buffers, name


@contextlib.contextmanager
def _state_kept(nodes: SegmentNodes, where: str) -> Iterator[None]:
    """Puts back what modules write: statistics, which the step collects.

    Args:
        nodes: that are computed.
        where: who asks, for messages.

    Raises:
        UnsupportedError: a module has changed other state, which decides what it computes next.
    """
    stateful: dict[nn.Module, set[str]] = {}
    for node in nodes.nodes:
        for module, names in node.stateful.items():
            stateful.setdefault(module, set()).update(names)
        for module, name in changed_slots(node):
            stateful.setdefault(module, set()).add(name)
    written = [
        (tensor, tensor.detach().clone(), keeps_state({module: {name}}))
        for module, names in stateful.items()
        for name in names
        if (tensor := module._buffers.get(name, module._parameters.get(name))) is not None
    ]
    others = [each for each, names in stateful.items() if keeps_state({each: names})]
    snapshot = Snapshot(others, moved={id(each[0]) for each in written})
    changed = False
    try:
        yield
    finally:
        changed = bool(snapshot.note_changes())
        snapshot.put_back()
        for tensor, before, is_state in written:
            changed |= is_state and not torch.equal(tensor, before)
            tensor.detach().copy_(before)
    if changed:
        raise depends_on_values(where, "a module keeps state, which each microbatch moves on")
