"""The cost tree of a model, opened as far as partitions need, and its tied groups.

From the root down, a unit is opened while it is too heavy for one partition, or holds units pinned
to several. Units that share a parameter form a group, which goes to one partition.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from smdistributed.modelparallel.common.errors import PartitionError

#: Bytes that training keeps for each parameter byte: itself, its gradient, two optimizer moments.
STATE_FACTOR = 4
# A unit this much above an even share still counts as one that a partition may take.
_TOLERANCE = Fraction(102, 100)


@dataclass(frozen=True)
class Unit:
    """A node of the cost tree.

    Costs are the unit's own, without its children's: what a container computes itself (its glue)
    and the parameters that it registers itself.

    Attributes:
        name: unique in the tree.
        compute: time or operations, in any one unit for the whole tree.
        memory: bytes, of parameters or of parameters and activations. A shared parameter counts at
            one of its units only.
        order: position of the first execution; decides the sequence.
        shared: keys of the parameters among its own that other units hold too.
        pinned: the partition that the user gave it; children without their own inherit it.
        children: in order of execution.
        output_bytes: what crosses when the sequence is cut behind this unit.
        splittable: whether it may be opened at all.
    """

    name: str
    compute: float
    memory: float
    order: int
    shared: frozenset[str] = frozenset()
    pinned: int | None = None
    children: tuple[Unit, ...] = ()
    output_bytes: float = 0.0
    splittable: bool = True


@dataclass(eq=False)
class Node:
    """A unit with the sums of its subtree, and whether it was opened.

    Attributes:
        position: (order of execution, place in the tree).
        pin: the unit's own or an inherited one.
        children: nodes of the unit's children.
        own_load: the unit's own weighted share, as an integer.
        compute, memory, load, keys, pins: of the whole subtree.
        is_open: whether the children are placed by themselves.
    """

    unit: Unit
    position: tuple[int, int]
    pin: int | None
    children: list[Node]
    own_load: int
    compute: float
    memory: float
    load: int
    keys: frozenset[str]
    pins: frozenset[int]
    is_open: bool = False

    @property
    def held_compute(self) -> float:
        """What is placed with this node: the subtree's, or the unit's own where it is open."""
        return self.unit.compute if self.is_open else self.compute

    @property
    def held_memory(self) -> float:
        """As ``held_compute``."""
        return self.unit.memory if self.is_open else self.memory

    @property
    def held_load(self) -> int:
        """As ``held_compute``."""
        return self.own_load if self.is_open else self.load

    @property
    def held_keys(self) -> frozenset[str]:
        """As ``held_compute``."""
        return self.unit.shared if self.is_open else self.keys

    @property
    def can_open(self) -> bool:
        """Whether children can be placed instead of this node."""
        return not self.is_open and self.unit.splittable and bool(self.children)


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes that go together, in the order of execution."""

    nodes: tuple[Node, ...]
    pin: int | None

    @cached_property
    def load(self) -> int:
        """Weighted share of all nodes, as an integer."""
        return sum(node.held_load for node in self.nodes)

    @cached_property
    def has_parameters(self) -> bool:
        """Whether the group holds memory, its own or shared."""
        return any(node.held_memory or node.held_keys for node in self.nodes)

    @property
    def is_tied(self) -> bool:
        """Whether parameters hold the nodes together."""
        return len(self.nodes) > 1 and any(node.held_keys for node in self.nodes)

    def position(self, at_last: bool) -> tuple[int, int]:
        """Place in the sequence: of the first or of the last node."""
        return self.nodes[-1 if at_last else 0].position


def flatten(root: Unit, num_partitions: int, memory_weight: float) -> Node:
    """The tree with the sums of its subtrees, checked."""
    units: dict[str, Unit] = {}
    _collect(root, units)
    loads = _loads(list(units.values()), memory_weight)
    places = {name: place for place, name in enumerate(units)}

    def visit(unit: Unit, inherited: int | None) -> Node:
        pin = inherited if unit.pinned is None else unit.pinned
        if pin is not None and not 0 <= pin < num_partitions:
            raise PartitionError(
                f"Partitions are numbered from 0 to {num_partitions - 1}; {unit.name!r} is pinned "
                f"to {pin}: pin it to one of these, or raise the degree of pipeline parallelism."
            )
        children = [visit(child, pin) for child in unit.children]
        own_load = loads[places[unit.name]]
        own_pins = frozenset(() if pin is None else (pin,))
        return Node(
            unit,
            (unit.order, places[unit.name]),
            pin,
            children,
            own_load,
            unit.compute + sum(child.compute for child in children),
            unit.memory + sum(child.memory for child in children),
            own_load + sum(child.load for child in children),
            unit.shared.union(*(child.keys for child in children)),
            own_pins.union(*(child.pins for child in children)),
        )

    return visit(root, None)


def _loads(units: Sequence[Unit], memory_weight: float) -> list[int]:
    """Weighted shares as integers, without rounding: equal loads are equal on every rank."""
    weight = Fraction(memory_weight).limit_denominator(10**6)
    computes = [Fraction(unit.compute) for unit in units]
    memories = [Fraction(unit.memory) for unit in units]
    per_compute = (1 - weight) / (sum(computes) or 1)
    per_memory = weight / (sum(memories) or 1)
    shares = [
        per_memory * memory + per_compute * compute
        for memory, compute in zip(memories, computes, strict=True)
    ]
    unit = math.lcm(*(share.denominator for share in shares))
    return [int(share * unit) for share in shares]


def _collect(unit: Unit, units: dict[str, Unit]) -> None:
    if unit.name in units:
        raise PartitionError(
            f"Names of units are unique; received {unit.name!r} twice: name units by their path."
        )
    if not all(0 <= cost < math.inf for cost in (unit.compute, unit.memory, unit.output_bytes)):
        raise PartitionError(
            f"Costs are finite and not negative; {unit.name!r} has compute {unit.compute}, memory "
            f"{unit.memory} and output_bytes {unit.output_bytes}: measure it again."
        )
    units[unit.name] = unit
    for child in unit.children:
        _collect(child, units)


def open_and_group(root: Node, num_partitions: int) -> list[Group]:
    """Opens what must be opened, and groups what remains."""

    def is_heavy(load: int) -> bool:
        return load * num_partitions > _TOLERANCE * root.load

    def open_node(node: Node) -> None:
        node.is_open = True
        for child in node.children:
            settle(child)

    def settle(node: Node) -> None:
        if len(node.pins) > 1 and not node.can_open:
            raise PartitionError(
                f"A unit that cannot be split is on one partition; {node.unit.name!r} holds units "
                f"pinned to {sorted(node.pins)}: pin them to one partition."
            )
        if len(node.pins) > 1 or (node.can_open and is_heavy(node.load)):
            open_node(node)

    settle(root)
    while True:
        groups = grouped(root)
        # A heavy group may be tied by a small part of a unit that was light by itself.
        openable = [
            node
            for group in groups
            if len(group.nodes) > 1 and is_heavy(group.load)
            for node in group.nodes
            if node.can_open
        ]
        if not openable and len(groups) < num_partitions:
            candidates = [node for group in groups for node in group.nodes if node.can_open]
            openable = sorted(candidates, key=lambda node: -node.load)[:1]
        if not openable:
            return groups
        for node in openable:
            open_node(node)


def grouped(root: Node) -> list[Group]:
    """Groups of nodes that share a parameter, or that are an open node and its first one below."""
    members: list[Node] = []
    leaders: dict[int, int] = {}

    def leader(place: int) -> int:
        while leaders[place] != place:
            leaders[place] = place = leaders[leaders[place]]
        return place

    def join(a: Node, b: Node) -> None:
        first, second = sorted((leader(a.position[1]), leader(b.position[1])))
        leaders[second] = first

    def visit(node: Node) -> Node:
        members.append(node)
        leaders[node.position[1]] = node.position[1]
        if not node.is_open:
            return node
        below = [visit(child) for child in node.children]
        first = min(below, key=lambda one: one.position)
        if node.pin is None and not node.unit.shared:
            join(node, first)
        return first

    visit(root)
    holders: dict[str, list[Node]] = defaultdict(list)
    for node in members:
        for key in node.held_keys:
            holders[key].append(node)
    for _, nodes in sorted(holders.items()):
        _common_pin(nodes)  # names this one parameter, if it is the reason
        for node in nodes[1:]:
            join(nodes[0], node)
    groups: dict[int, list[Node]] = defaultdict(list)
    for node in sorted(members, key=lambda node: node.position):
        groups[leader(node.position[1])].append(node)
    return [Group(tuple(nodes), _common_pin(nodes)) for nodes in groups.values()]


def _pins(nodes: Iterable[Node]) -> frozenset[int]:
    """Where nodes must be; an open node speaks for itself, a closed one for all within."""
    return frozenset[int]().union(
        *(
            node.pins if not node.is_open else () if node.pin is None else (node.pin,)
            for node in nodes
        )
    )


def _common_pin(nodes: Sequence[Node]) -> int | None:
    """The one partition where nodes that go together must be, if any."""
    pins = _pins(nodes)
    if len(pins) > 1:
        keys = ", ".join(map(repr, sorted(frozenset[str]().union(*(n.held_keys for n in nodes)))))
        places = ", ".join(
            f"{node.unit.name!r} on {min(_pins([node]))}" for node in nodes if _pins([node])
        )
        raise PartitionError(
            f"Units that share a parameter are on one partition; received units that share {keys} "
            f"and are pinned apart ({places}): pin them to one partition."
        )
    return next(iter(pins), None)
