"""Plans of what is computed ahead of a step: each is made once, and cut into parts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType

from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.planning.parts import on_one_rank, part_giving, parts_between
from smdistributed.modelparallel.torch.planning.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.record.ir import (
    Graph,
    Node,
    NodeKind,
    Value,
    changed_attributes,
)
from smdistributed.modelparallel.torch.record.questions.question import Before
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensor_parallel import exchange
from smdistributed.modelparallel.torch.tensor_parallel.module import places_in

logger = logging.getLogger(__name__)

#: Where exchanges of tensor-parallel ranks are.
_OF_GROUP = exchange.__name__.rpartition(".")[0]


@dataclass
class Part:
    """A part of what comes before a question.

    Attributes:
        nodes: what it computes.
        inputs: the values of the step's tensor arguments that it reads.
        program: computes it, on the rank that does.
        together: names of what tensor-parallel ranks compute together in it.
    """

    nodes: SegmentNodes
    inputs: list[Value]
    program: Program | None
    together: list[str]


@dataclass
class Ready:
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
    last: Part
    parts: dict[int, list[Part]] = field(default_factory=dict)


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

    def ready(self, before: Before, asked: Sequence[Value], where: str, *, placed: bool) -> Ready:
        """Returns what comes before a question.

        Args:
            before: it.
            asked: the values that are asked about.
            where: who asks.
            placed: the models have their partitions.
        """
        if before.ready is None:
            plan = self._cut(before.graph) if placed else on_one_rank(before.graph)
            digest = hashlib.sha256("\n".join(plan.lines()).encode()).hexdigest()
            last = self._part(plan, part_giving(plan, asked, before.num_nodes))
            before.ready = Ready(plan, before.num_nodes, digest, last)
            self._tell(where)
        ready: Ready = before.ready
        return ready

    def _tell(self, place: str) -> None:
        if place not in self._places and self._runtime.coordinates.pp_rank == 0:
            logger.warning(
                "%s asks for the value of an activation: in each microbatch what comes before it "
                "is computed once more, without gradients, before the step",
                place,
            )
        self._places.add(place)

    def parts(self, ready: Ready, start: int, *, placed: bool) -> list[Part]:
        """Returns what is left to compute before a question.

        Args:
            ready: what comes before it.
            start: how many nodes were computed for questions before.
            placed: the models have their partitions.
        """
        if start not in ready.parts:
            # Of models that have no partition yet no more than needed is copied to the device; in
            # one go if code between modules writes to state, which is put back after each part.
            singly = not (placed or self._runtime.device.type == "cpu" or _writes(ready.plan.graph))
            parts = parts_between(ready.plan, start, ready.num_nodes, singly=singly)
            ready.parts[start] = [self._part(ready.plan, each) for each in parts]
        return ready.parts[start]

    def _part(self, plan: Plan, nodes: SegmentNodes) -> Part:
        runtime = self._runtime
        inputs = [node.outputs[0] for node in nodes.nodes if node.kind is NodeKind.INPUT]
        program = None
        if nodes.rank == runtime.coordinates.pp_rank:
            program = Program(plan, nodes, runtime.device, runtime.random)
        together = dict.fromkeys(name for node in nodes.nodes for name in _together(node))
        return Part(nodes, inputs, program, list(together))


def _together(node: Node) -> list[str]:
    """Returns the names of what tensor-parallel ranks compute together in a node.

    Before there are partitions a module is recorded by its calls, exchanges among them.
    """
    if node.kind is NodeKind.LEAF:
        return places_in(node.target)
    if node.kind is NodeKind.CALL:
        target = node.target
        maker = target if isinstance(target, FunctionType) else getattr(target, "__self__", None)
        is_of_group = getattr(maker, "__module__", "").startswith(_OF_GROUP)
        return [maker.__name__.strip("_")] if is_of_group else []  # type: ignore[union-attr]
    return []


def _writes(graph: Graph) -> bool:
    """Whether calls between modules write to parameters or buffers."""
    return any(True for node in graph.nodes for _ in changed_attributes(node))
