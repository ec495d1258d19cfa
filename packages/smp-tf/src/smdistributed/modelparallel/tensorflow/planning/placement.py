"""Which partition executes which forward operation, and so where each variable lives.

Automatic: the layers are the tree that the partitioner of smp-common cuts; operations between
layers follow what they read. Manual: ``smp.partition`` says it. In both, operations that touch one
variable, or pass a resource on, are together.

Source: model-parallel-core-features.md, Automated Model Splitting with TensorFlow.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.planning.partitioner import (
    Assignment,
    PlacedUnit,
    Unit,
    partition,
)
from smdistributed.modelparallel.tensorflow.compat import graphs
from smdistributed.modelparallel.tensorflow.planning.layers import (
    MEMORY_WEIGHTS,
    Layers,
    handles_of_gradient,
    path_of,
    placeable,
)
from smdistributed.modelparallel.tensorflow.record.tracing import FOLLOWS, PARTITION, Trace


@dataclass
class Placement:
    """What is decided about one model; later traces of it keep to it and add to it.

    Attributes:
        assignment: of the layers; from the first trace.
        homes: partition by ``id`` of TensorFlow's variable.
    """

    assignment: Assignment | None = None
    homes: dict[int, int] = field(default_factory=dict)


def place(
    trace: Trace,
    placement: Placement,
    *,
    num_partitions: int,
    is_automatic: bool,
    default_partition: int,
    optimize: str,
) -> dict[Any, int]:
    """Returns the partition of every forward operation but constants, which are everywhere.

    Args:
        trace: of the model.
        placement: changed in place.
        num_partitions: over which to spread.
        is_automatic: by the partitioner, not by ``smp.partition``.
        default_partition: of what no ``smp.partition`` encloses.
        optimize: what the partitioner balances.
    """
    ops = placeable(trace)
    memory_weight = MEMORY_WEIGHTS[optimize]
    if not is_automatic:
        wanted = functools.partial(_as_asked, default_partition, trace.added)
    elif num_partitions == 1:
        wanted = functools.partial(_as_asked, 0, trace.added)
    else:
        if placement.assignment is None:
            tree = Layers.of(trace, ops).tree(optimize)
            placement.assignment = partition(tree, num_partitions, memory_weight)
        wanted = functools.partial(_by_layer, placement.assignment)
    placed = _Placing(trace, ops, placement.homes, wanted, default_partition).run()
    if placement.assignment is None:
        units = _units(Layers.of(trace, ops).tree(optimize), placed)
        placement.assignment = Assignment(tuple(units), num_partitions, memory_weight)
    return placed


def _units(tree: Unit, placed: Mapping[Any, int]) -> Iterator[PlacedUnit]:
    """Yields the layers that are whole on one partition, and what those between them hold."""
    partitions: dict[str, Counter[int]] = defaultdict(Counter)
    own: dict[str, Counter[int]] = defaultdict(Counter)
    for op, index in placed.items():
        names = ["", *path_of(op)]
        own[names[-1]][index] += 1
        for name in names:
            partitions[name][index] += 1

    def below(unit: Unit) -> Iterator[PlacedUnit]:
        found = partitions[unit.name]
        if len(found) > 1:
            ((most, _),) = (own[unit.name] or found).most_common(1)
            yield PlacedUnit(unit.name, most, unit.compute, unit.memory, is_split=True)
            for child in unit.children:
                yield from below(child)
        elif found:
            every = list(_subtree(unit))
            compute, memory = sum(e.compute for e in every), sum(e.memory for e in every)
            yield PlacedUnit(unit.name, next(iter(found)), compute, memory)

    return below(tree)


def _subtree(unit: Unit) -> Iterator[Unit]:
    yield unit
    for child in unit.children:
        yield from _subtree(child)


def _as_asked(default: int, added: Set[Any], op: Any) -> int | None:
    """Returns what ``smp.partition`` said of an operation; None for one that the user did not make.

    Such an operation goes with what it reads, or with what reads it.
    """
    if op in added or graphs.attribute(op, FOLLOWS):
        return None
    asked = graphs.attribute(op, PARTITION)
    return default if asked is None else int(asked)


def _by_layer(assignment: Assignment, op: Any) -> int | None:
    """Returns where the partitioner put the outermost layer that it placed whole.

    Between layers, what touches a variable goes with the layer that has it; the rest follows.
    """
    path = ["", *path_of(op)]
    for name in path:
        if name in assignment.units:
            return assignment.units[name]
    if any(tensor.dtype == tf.resource for tensor in op.inputs):
        return assignment.containers.get(path[-1])
    return None


class _Placing:
    """One run of ``place``."""

    def __init__(
        self,
        trace: Trace,
        ops: list[Any],
        homes: dict[int, int],
        wanted: Callable[[Any], int | None],
        default: int,
    ) -> None:
        self._trace = trace
        self._ops = ops
        self._homes = homes
        self._wanted = wanted
        self._default = default
        self._placed: dict[Any, int] = {}
        self._by_name = {op.name: op for op in ops}
        self._positions = {op: position for position, op in enumerate(ops)}
        self._resources = _Resources(trace, ops)
        self._fixed: dict[str, int] = {}  # by group of resources
        for variable in trace.variable_names.values():
            if variable in homes:
                self._fixed[self._resources.group(str(variable))] = homes[variable]

    def run(self) -> dict[Any, int]:
        """Returns the partition of each operation."""
        for op in self._ops:
            self._try(op)
        # What reads nothing that is placed goes to the first that reads it.
        consumers = self._consumers()
        for op in reversed(self._ops):
            if op not in self._placed:
                readers = [self._placed[each] for each in consumers[op] if each in self._placed]
                self._place(op, readers[0] if readers else self._default)
        for variable in self._trace.variable_names.values():
            group = self._resources.group(str(variable))
            if group in self._fixed:
                self._homes.setdefault(variable, self._fixed[group])
        return self._placed

    def _try(self, op: Any) -> None:
        """Places an operation if anything says where."""
        wanted = self._wanted(op)
        if wanted is None:
            # What differentiates an operation in the call goes with it.
            names = (self._by_name.get(name) for name in graphs.colocated_with(op))
            beside = [self._placed[each] for each in names if each in self._placed]
            wanted = beside[0] if beside else None
        if wanted is None:
            makers = [each.op for each in op.inputs if each.op in self._placed]
            if makers:
                wanted = self._placed[max(makers, key=self._positions.__getitem__)]
        group = self._resources.group_of(op)
        if wanted is not None or group in self._fixed:
            self._place(op, wanted)

    def _place(self, op: Any, wanted: int | None) -> None:
        """Places an operation where it is wanted, unless its resources are elsewhere."""
        group = self._resources.group_of(op)
        if group is not None:
            if wanted is not None:
                self._fixed.setdefault(group, wanted)
            wanted = self._fixed[group]
        assert wanted is not None
        self._placed[op] = wanted

    def _consumers(self) -> Mapping[Any, list[Any]]:
        consumers: dict[Any, list[Any]] = defaultdict(list)
        for op in self._ops:
            for tensor in op.inputs:
                consumers[tensor.op].append(op)
            for earlier in op.control_inputs:
                consumers[earlier].append(op)
        return consumers


class _Resources:
    """Variables and other resources of a trace, in groups that some operation needs together.

    A loop takes all variables that its body reads; a custom gradient computes the gradients of all
    variables that it is about; what makes a list and what reads it are on one process, since a list
    cannot be sent.
    """

    def __init__(self, trace: Trace, ops: list[Any]) -> None:
        self._leaders: dict[str, str] = {}
        self._variables = trace.variable_names
        for op in ops:
            names = self._names(op)
            for name in names:
                self._leaders.setdefault(name, name)
            for name in names[1:]:
                self._leaders[self.group(name)] = self.group(names[0])

    def group(self, name: str) -> str:
        """Returns the name that stands for the group of a resource."""
        while self._leaders.setdefault(name, name) != name:
            name = self._leaders[name]
        return name

    def group_of(self, op: Any) -> str | None:
        """Returns the group of the resources that an operation takes or makes; None without any."""
        names = self._names(op)
        return self.group(names[0]) if names else None

    def _names(self, op: Any) -> list[str]:
        tensors = [*op.inputs, *op.outputs, *handles_of_gradient(op)]
        return [
            str(self._variables.get(tensor.name, tensor.name))
            for tensor in tensors
            if tensor.dtype in (tf.resource, tf.variant)
        ]


def check_index(index: int, num_partitions: int) -> None:
    """Raises unless ``smp.partition`` can take an index."""
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(
            f"smp.partition takes the index of a partition, an int; received {index!r}."
        )
    if not 0 <= index < num_partitions:
        raise _NoPartitionError(
            f"partitions are numbered from 0 to {num_partitions - 1}; smp.partition received "
            f"{index}: use one of these, or raise partitions (pipeline_parallel_degree)."
        )


class _NoPartitionError(PartitionError, ValueError):
    """A partition that does not exist."""
