"""Cutting a captured graph along the partition.

A segment is a maximal run of nodes of one rank between two transfers. Values that leave a segment
are cut from autograd there, also towards a later segment of the same rank, so that the backward
pass of a segment is one call of autograd.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.schedule import Edge, Segment, SegmentGraph
from smdistributed.modelparallel.torch.planning.changed_parameters import (
    parameters_in_turn,
    written_in_place,
)
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.late_values import (
    LateValues,
    inputs_of,
    late_values,
)
from smdistributed.modelparallel.torch.planning.products import DIFFERENTIATING
from smdistributed.modelparallel.torch.planning.ranks import Ranks
from smdistributed.modelparallel.torch.planning.recomputing import check_recomputed
from smdistributed.modelparallel.torch.planning.runs import (
    apart_from_runs,
    runs_of,
    work_of_run,
)
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.replicated import sources
from smdistributed.modelparallel.torch.state.carried import Carried, History
from smdistributed.modelparallel.torch.tensors.functions import SWITCHING_GRADIENTS
from smdistributed.modelparallel.torch.tensors.nested import placeholders
from smdistributed.modelparallel.torch.trial.turns import keeps_state


@dataclass(eq=False)
class SegmentNodes:
    """What one segment computes.

    Attributes:
        index: position in the forward pass.
        rank: pp_rank that runs it.
        nodes: its own nodes and the replicated ones that they need, in order.
        inputs: values that it takes from other segments.
        outputs: values that other segments, the result or the backward pass take from it.
        changed: values whose tensors it changes in place.
        costs: of its own nodes; ``weights`` are those of gradients that can be put off.
        seconds: the same, as its passes were timed; None before they were.
    """

    index: int
    rank: int
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    changed: set[Value] = field(default_factory=set)
    costs: PassCosts = field(default_factory=PassCosts)
    seconds: PassCosts | None = None


@dataclass(eq=False)
class Plan:
    """A graph cut into segments.

    Attributes:
        readers: value -> segments other than its own that read it.
        with_gradient: the values at cuts that receive a gradient.
        backward: segments that have a backward pass.
        in_seconds: whether costs are seconds, which were measured.
        late: what is computed from gradients of activations.
    """

    graph: Graph
    segments: list[SegmentNodes]
    readers: dict[Value, list[int]]
    with_gradient: set[Value]
    backward: set[int]
    in_seconds: bool
    late: LateValues = field(default_factory=LateValues)

    def ranks_reading(self, value: Value) -> list[int]:
        """Returns the ranks other than the producer's that read a value, ascending."""
        own = self.segments[value.node.segment].rank
        return sorted({self.segments[index].rank for index in self.readers.get(value, ())} - {own})

    @cached_property
    def with_graph(self) -> set[int]:
        """The segments that compute with gradients: for a backward pass, or in the forward one."""
        asked = {each.segment for each in self.graph.nodes if each.target in DIFFERENTIATING}
        return self.backward | asked

    @cached_property
    def comes_again(self) -> set[Node]:
        """The nodes that are computed once more, for a gradient in the forward pass."""
        return {each.call for each in self.graph.nodes if each.beside is not None}

    @cached_property
    def histories(self) -> dict[Carried, History]:
        """What modules do to the objects with state that they are given."""
        found: dict[Carried, History] = {}
        for node in self.graph.nodes:
            for carried in placeholders((node.args, node.kwargs), Carried):
                found.setdefault(carried, History(carried))
            for carried, effects in node.effects:
                found[carried].add(node.index, node.name, effects)
        return found

    def owner(self, value: Value) -> int:
        """Returns the rank that has a value, which is no replicated one."""
        return _rank_of(self.segments, value)

    def modules(self, segments: Iterable[int]) -> set[nn.Module]:
        """Returns the modules that segments call, or whose parameters they read."""
        chosen = set(segments)
        nodes = [node for each in self.segments if each.index in chosen for node in each.nodes]
        return {node.target for node in nodes if node.kind is NodeKind.LEAF} | {
            node.target[0] for node in nodes if node.kind is NodeKind.ATTRIBUTE
        }

    @cached_property
    def in_turn(self) -> list[str]:
        """Why microbatches must run one after the other; empty if they may overlap."""
        found = [*_called_again(self.graph), *_reached(self.graph), *parameters_in_turn(self.graph)]
        return found + [
            f"of {node.name or 'the model'}, {node.in_turn}"
            for segment in self.segments
            if segment.index in self.backward
            for node in segment.nodes
            if node.in_turn
        ]

    @cached_property
    def differentiated(self) -> dict[Node, set[Value]]:
        """The nodes that the gradient of the roots flows through, and by which of their results."""
        found: dict[Node, set[Value]] = {}
        pending = list(self.graph.roots)
        while pending:
            value = pending.pop()
            node = value.node
            if node not in found:
                pending += [each for each in _read(node) if each.requires_grad]
            found.setdefault(node, set()).add(value)
        return found

    def inputs_of_rank(self, rank: int) -> set[int]:
        """Returns the positions of the step's tensor arguments that a rank computes with."""
        nodes = [
            node for segment in self.segments if segment.rank == rank for node in segment.nodes
        ]
        nodes += sources([value for value in self.graph.returned if value.replicated])
        return {node.target for node in nodes if node.kind is NodeKind.INPUT} | inputs_of(self.late)

    @property
    def is_timed(self) -> bool:
        """Whether its passes were timed."""
        return all(segment.seconds is not None for segment in self.segments)

    def segment_graph(
        self, num_ranks: int, *, halves: bool = False, timed: bool = False
    ) -> SegmentGraph:
        """Returns the shape of the plan, as the simulator takes it.

        Args:
            num_ranks: size of the pipeline.
            halves: backward passes are two, where that gives the second something to do.
            timed: costs are what passes took.
        """
        known = [(timed and segment.seconds) or segment.costs for segment in self.segments]
        total = sum(costs.forward for costs in known) or 1
        # Every pass costs something, also one without counted operations.
        floor = total * 1e-3 / max(1, len(self.segments))  # a step may compute nothing
        segments = []
        for segment, cost in zip(self.segments, known, strict=True):
            costs = cost + PassCosts(floor, 2 * floor)
            backward = segment.index in self.backward
            later = costs.weights if halves and backward else 0.0
            segments.append(
                Segment(
                    index=segment.index,
                    rank=segment.rank,
                    forward_cost=costs.forward,
                    backward_cost=costs.backward - later if backward else 0.0,
                    has_backward=backward,
                    weight_cost=later or None,
                )
            )
        edges = [
            Edge(
                source=value.node.segment,
                target=reader,
                num_bytes=value.num_bytes,
                has_grad=value in self.with_gradient and reader in self.backward,
            )
            for value, readers in self.readers.items()
            for reader in readers
        ]
        # What parts of a rank leave to each other past their values, in an object with state or in
        # a module, is seen in the order of the script.
        latest: dict[int, int] = {}
        for segment in self.segments:
            if segment.rank in latest:
                edges.append(Edge(latest[segment.rank], segment.index, 0, has_grad=False))
            latest[segment.rank] = segment.index
        return SegmentGraph(tuple(segments), tuple(edges), num_ranks)

    def digest(self) -> str:
        """Returns a hash of everything that ranks must agree on."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def lines(self) -> list[str]:
        """Returns the plan as text, a line a node; compared between ranks when they differ."""
        nodes = self.graph.lines(lambda node: f" rank {node.rank} segment {node.segment}")
        kept = [f"kept: {value}" for value in self.graph.kept]
        return [*nodes, *(f"segment {each.index}: {each.costs}" for each in self.segments), *kept]


def cut(
    graph: Graph,
    partition_of: Mapping[nn.Module, int],
    owner_of: Callable[[Slot], int],
    costs: ComputeCosts,
) -> Plan:
    """Cuts a graph into segments.

    Args:
        graph: the captured microbatch; its nodes get their ranks and segments here.
        partition_of: the partition of every leaf module.
        owner_of: the partition that holds a parameter.
        costs: what work costs.

    Raises:
        UnsupportedError: glue code combines parameters of two partitions, or changes a tensor in
            place that another partition also sees.
    """
    segments = _assign(graph, partition_of, owner_of, costs)
    readers: dict[Value, list[int]] = {}
    for segment in segments:
        own, segment.nodes = segment.nodes, []
        gathered: set[Node] = set(own)
        for node in own:
            for value in _read(node):
                _gather(value, segment, gathered, readers)
        segment.nodes = sorted(gathered, key=lambda node: node.index)
        segment.changed = {value for node in segment.nodes for value in node.changes}
    returned = set(graph.returned)
    late = late_values(graph, functools.partial(_rank_of, segments))
    taken = {*readers, *returned, *graph.roots, *late.gradients, *late.kept}
    for segment in segments:
        segment.outputs = [
            value
            for node in segment.nodes
            if node.segment == segment.index
            for value in node.outputs
            if value in taken
        ]
    if costs.compiles_runs and not costs.measures:
        for segment in segments:
            apart = apart_from_runs(graph, late)
            segment.costs += _saved_by_runs(segment, costs, apart)
    _check_in_place(graph, readers, returned)
    _check_state(graph)
    _check_reached(graph, owner_of)
    _check_rewrites(graph)
    _check_shown(graph)
    with_gradient, backward = _backward_reach(graph, segments)
    _check_carried(segments, backward)
    check_recomputed(graph, backward)
    return Plan(graph, segments, readers, with_gradient, backward, costs.measures, late)


def _rank_of(segments: Sequence[SegmentNodes], value: Value) -> int:
    """Returns the rank that has a value: a gradient is where its activation is."""
    node = value.node
    if node.kind is NodeKind.GRADIENT:
        return _rank_of(segments, node.args[0])
    return node.rank if node.segment < 0 else segments[node.segment].rank


def _assign(
    graph: Graph,
    partition_of: Mapping[nn.Module, int],
    owner_of: Callable[[Slot], int],
    costs: ComputeCosts,
) -> list[SegmentNodes]:
    """Gives every node a rank and groups consecutive nodes of one rank."""
    segments: list[SegmentNodes] = []
    ranks = Ranks(graph, partition_of, owner_of)
    for node in ranks.in_order:
        if not ranks.place(node):
            continue
        if not segments or segments[-1].rank != node.rank:
            segments.append(SegmentNodes(len(segments), node.rank))
        segments[-1].nodes.append(node)
        cost = costs.of(node.work)
        segments[-1].costs += cost if node.grad_enabled else replace(cost, weights=0.0)
        node.segment = segments[-1].index
    ranks.parameters.check(graph)
    return segments


def _saved_by_runs(segment: SegmentNodes, costs: ComputeCosts, apart: set[Value]) -> PassCosts:
    """Returns what it changes of a segment's costs that its runs are compiled."""
    saved = PassCosts()
    later = set(segment.outputs)
    for part, is_run in reversed(list(runs_of(segment.nodes, apart))):
        own = [node for node in part if node.segment == segment.index]
        if is_run and own:
            saved += costs.of(work_of_run(own, later))
            saved -= sum((costs.of(node.work) for node in own), PassCosts())
        later.update(value for node in part for value in node.inputs)
    return saved


def _gather(
    value: Value, segment: SegmentNodes, gathered: set[Node], readers: dict[Value, list[int]]
) -> None:
    """Notes where a segment gets a value: from another segment, or by computing it again."""
    node = value.node
    if node.segment >= 0:
        if node.segment != segment.index and value not in segment.inputs:
            segment.inputs.append(value)
            readers.setdefault(value, []).append(segment.index)
        return
    for needed in sources([value]):
        if needed not in gathered:
            gathered.add(needed)


def _check_in_place(graph: Graph, readers: Mapping[Value, list[int]], returned: set[Value]) -> None:
    """Refuses in-place changes that another segment would have to see, or must not see."""
    last_read = {value: node.index for node in graph.nodes for value in node.inputs}
    last_read |= dict.fromkeys(returned, len(graph.nodes))
    for node in graph.nodes:
        for value in (*node.changes, *node.aliases):
            # Code between modules changes a parameter on its rank; of a buffer of a split module a
            # copy changes.
            is_copy = value.replicated or value.node.target in graph.buffers
            is_seen = is_copy or written_in_place(graph, node)
            if value.node.kind is NodeKind.ATTRIBUTE and graph.roots and not is_seen:
                raise UnsupportedError(
                    f"{node.name} changes {value.node.name}, which it is given, in place, while a "
                    "pipelined step runs: other partitions and microbatches would not see it when "
                    "one process would. Change it in the module that has it, or between two calls "
                    "of step functions."
                )
        if node.segment < 0 or node.target in SWITCHING_GRADIENTS:
            continue
        for value in (*node.changes, *node.aliases):
            maker = value.node
            if value.source in maker.kept and maker.segment != node.segment:
                raise UnsupportedError(
                    f"{node.name} changes a tensor in place that {maker.name}, on another "
                    "partition, has also put into an attribute, where it would not be seen. Use "
                    "the out-of-place operation."
                )
        for value in node.aliases:
            crosses = value.node.segment >= 0 and value.node.segment != node.segment
            if crosses and last_read.get(value, -1) > node.index:
                raise UnsupportedError(
                    f"{node.name} changes a tensor in place that shares memory with a result of "
                    f"{value.node.name} on another partition, which is used afterwards. Use the "
                    "out-of-place operation."
                )
        for value in node.changes:
            if value.node.segment == node.segment and any(
                index != node.segment for index in readers.get(value, ())
            ):
                raise UnsupportedError(
                    f"{node.name} changes a result of {value.node.name} in place that another "
                    "partition reads in its former state. Use the out-of-place operation."
                )


def _check_state(graph: Graph) -> None:
    """Refuses code that reads what a module changes, but for statistics that it changes, too.

    These lie on one rank, and microbatches follow each other.
    """
    stateful = graph.stateful
    written = {slot for node in graph.nodes for slot in written_in_place(graph, node)}
    for node in graph.nodes:
        if node.kind is not NodeKind.ATTRIBUTE:
            continue
        module, name = node.target
        is_statistic = node.target in written and not keeps_state({module: {name}})
        if name in stateful.get(module, ()) and not is_statistic:
            raise UnsupportedError(
                f"{node.name} is changed by the module that has it, and read by code outside it: "
                "microbatches that are under way would see each other's. Read it between two "
                "calls of step functions, or put the modules on one partition."
            )


def _check_reached(graph: Graph, owner_of: Callable[[Slot], int]) -> None:
    """Refuses modules that use, without being given it, what their partition does not have."""
    stateful = graph.stateful
    for node in graph.nodes:
        for (module, name), is_whole in node.reached.items():
            has_one_home = is_whole or name in module._parameters
            is_absent = has_one_home and owner_of((module, name)) != node.rank
            if is_absent or (not is_whole and name in stateful.get(module, ())):
                raise UnsupportedError(
                    f"{node.name} uses {_slot(module, name)} without being given it, which "
                    "its partition does not have, or not alone while a call in this step changes "
                    "it. Pass it as an argument (and return what it becomes), or put the modules "
                    "on one partition."
                )


def _check_rewrites(graph: Graph) -> None:
    """Refuses writes to an activation, unseen by autograd, by a later call in its microbatch.

    What made the activation may lie on another partition, and computes its gradient with a copy.
    """
    calls = collections.Counter(node.target for node in graph.nodes if node.kind is NodeKind.LEAF)
    for node in graph.nodes:
        if node.rewrites and calls[node.target] > 1:
            raise UnsupportedError(
                f"{node.name} is called more than once in a microbatch, and may write to what an "
                "earlier call was given, through .data, where autograd does not see it (it does "
                "so, or it keeps state and decides by its input): the gradient would depend on "
                "the partition. Keep a copy (x.detach().clone()), or let it keep no state."
            )


def _check_shown(graph: Graph) -> None:
    """Refuses reading what a leaf has given of what it keeps, after a call that may write to it.

    In one process that shows what the call has written; here it is a copy.
    """
    calls: dict[nn.Module, Node] = {}
    writers: dict[tuple[nn.Module, str], Node] = {}
    for node in graph.nodes:
        for value in node.inputs:
            maker = value.node
            if value.source not in maker.shown:
                continue
            slots = maker.shown[value.source]
            later = [writers.get(slot, maker) for slot in slots] or [calls[maker.target]]
            if any(each.index > maker.index for each in later):
                raise UnsupportedError(
                    f"{node.name} reads what {maker.name} has given of a buffer or an attribute of "
                    "its own, after another call of a module, which may have written to it. Have "
                    "the module return a copy (x.clone()), or read it before."
                )
        if node.kind is NodeKind.LEAF:
            calls[node.target] = node
            writers.update(
                ((module, name), node) for module, names in node.stateful.items() for name in names
            )


def _called_again(graph: Graph) -> list[str]:
    """Returns which modules keep state and are called in several places.

    Each segment goes through the microbatches in order, and several segments take turns.
    """
    stateful = graph.stateful
    visits: dict[nn.Module, set[tuple[int, bool]]] = {}
    for node in graph.nodes:
        for module, flag in zip(node.modules, node.flags, strict=True):
            # Once more it finds statistics as they were, or computes without them.
            if module in stateful and not (flag and node.beside is not None):
                visits.setdefault(module, set()).add((node.segment, flag))
    return [
        f"a {type(module).__name__} keeps state that its calls change (buffers, attributes), and "
        "is called in several places of the pipeline, or training and not"
        for module, found in visits.items()
        if len(found) > 1
    ]


def _reached(graph: Graph) -> list[str]:
    """Returns which modules use what another one changes, or change it themselves."""
    stateful = graph.stateful
    return [
        f"{node.name} uses what another module has and a call changes ({_slot(module, name)})"
        for node in graph.nodes
        for module, name in node.reached
        if name in stateful.get(module, ())
    ]


def _slot(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name}"


def _check_carried(segments: Sequence[SegmentNodes], backward: set[int]) -> None:
    """Refuses objects that bring what is computed without gradients to what has some."""
    without: dict[tuple[int, Carried], Node] = {}
    for segment in segments:
        for node in segment.nodes:
            for maker in node.found if node.segment in backward else ():
                if maker.segment in backward and maker.segment != node.segment:
                    raise UnsupportedError(
                        f"{node.name} computes with what {maker.name} has left in an object (a "
                        "cache, say), in an earlier call of the model or before the pipeline came "
                        "back to this partition: its gradient cannot go back there. Detach what "
                        "goes into the object, return it and pass it on as a tensor, or make one "
                        "call of both."
                    )
            for carried in placeholders((node.args, node.kwargs), Carried):
                place = segment.rank, carried
                if segment.index not in backward and node.grad_enabled:
                    without.setdefault(place, node)
                elif segment.index in backward and place in without:
                    raise UnsupportedError(
                        f"{node.name} gets an object (a cache, say) that {without[place].name} had "
                        "in an earlier call of the model, whose results are not part of the loss: "
                        "gradients would not go back through the object. Make the earlier call "
                        "under torch.no_grad(), or return tensors and pass them on."
                    )


def _read(node: Node) -> Iterator[Value]:
    """Yields the values that a node computes with, or changes what they show."""
    yield from node.inputs
    yield from node.changed_views


def _passing(node: Node) -> Iterable[Value]:
    """Returns the values to which gradients may flow through a node."""
    if not node.grad_enabled:
        return node.changes  # the tensor is another by number alone
    return _read(node) if any(value.requires_grad for value in node.outputs) else ()


def _backward_reach(graph: Graph, segments: list[SegmentNodes]) -> tuple[set[Value], set[int]]:
    """Finds the segments and cut values that the gradient of the roots flows through."""
    with_gradient: set[Value] = set()
    backward: set[int] = set()
    pending = list(graph.roots)
    for root in graph.roots:
        if root.node.segment < 0 or not root.requires_grad:
            raise UnsupportedError(
                "model.backward was called on a tensor that does not depend on any parameter of "
                "the model."
            )
    while pending:
        value = pending.pop()
        with_gradient.add(value)
        if value.node.segment in backward:
            continue
        backward.add(value.node.segment)
        segment = segments[value.node.segment]
        read = {each for node in segment.nodes for each in _passing(node)}
        for needed in segment.inputs:
            if needed.requires_grad and needed in read and needed not in with_gradient:
                pending.append(needed)
    return with_gradient, backward
