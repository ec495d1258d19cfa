"""The layers of a trace: the operations and variables of each, as the partitioner takes them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.common.planning.partitioner import Unit
from smdistributed.modelparallel.tensorflow.compat import functions, graphs
from smdistributed.modelparallel.tensorflow.compat.variables import variable_bytes
from smdistributed.modelparallel.tensorflow.record.sizes import is_constant, num_bytes
from smdistributed.modelparallel.tensorflow.record.tracing import LAYER, Trace

#: Balance of variables against operations, see ``Layers.tree``.
MEMORY_WEIGHTS = {"memory": 0.95, "speed": 0.5}


def placeable(trace: Trace) -> list[Any]:
    """Returns the forward operations of a trace but constants, which are everywhere."""
    return [op for op in trace.operations if op in trace.forward and not is_constant(op)]


def path_of(op: Any) -> list[str]:
    """Returns the layers in whose call an operation was made, the outermost first."""
    path: str | None = graphs.attribute(op, LAYER)
    return path.split("/") if path else []


def handles_of_gradient(op: Any) -> list[Any]:
    """Returns the handles of the variables of a custom gradient, which is computed in one place."""
    if not graphs.has_custom_gradient(op):
        return []
    return [tensor.op.inputs[0] for tensor in op.inputs if tensor.op.type == "ReadVariableOp"]


@dataclass(eq=False)
class Layers:
    """The layers of a trace; "" is what lies around them all.

    Attributes:
        children: of each layer, by name, in the order of their first calls.
        operations: of each layer, its own.
        orders: position of the first operation.
        bytes_of: by name of a placeholder of a handle, of the variable behind it.
        handles: of the variables of each layer; one that several read is of the first.
        shared: of each layer, what others have as well, so that they go together.
        output_bytes: of what other layers read.
        whole: layers that are on one partition.
    """

    children: Mapping[str, Sequence[str]]
    operations: Mapping[str, list[Any]]
    orders: Mapping[str, int]
    bytes_of: Mapping[str, int]
    handles: Mapping[str, list[str]]
    shared: Mapping[str, set[str]]
    output_bytes: Mapping[str, int]
    whole: Set[str]

    @classmethod
    def of(cls, trace: Trace, ops: Iterable[Any]) -> Layers:
        """Returns the layers of a trace.

        Args:
            trace: of the model.
            ops: see ``placeable``.
        """
        children: dict[str, dict[str, None]] = defaultdict(dict)
        operations: dict[str, list[Any]] = defaultdict(list)
        orders: dict[str, int] = {}
        holders: dict[str, dict[str, None]] = defaultdict(dict)  # by placeholder of a handle
        made_in: dict[Any, str] = {}
        leaving: dict[str, dict[str, int]] = defaultdict(dict)
        parents: dict[str, str] = {}
        ties: dict[str, list[str]] = {}  # handles that a custom gradient is about
        takers: dict[str, set[str]] = defaultdict(set)  # handles that loops of a layer take
        for order, op in enumerate(ops):
            names = ["", *path_of(op)]
            for parent, child in itertools.pairwise(names):
                # A layer that is called in two places belongs where it was called first.
                if parents.setdefault(child, parent) == parent:
                    children[parent][child] = None
            for name in names:
                orders.setdefault(name, order)
            own = names[-1]
            operations[own].append(op)
            made_in[op] = own
            ties[op.name] = [handle.name for handle in handles_of_gradient(op)]
            if functions.called(op.node_def):
                takers[own].update(each.name for each in op.inputs)
            for tensor in op.inputs:
                if tensor.name in trace.variable_names:
                    holders[tensor.name][own] = None
                maker = made_in.get(tensor.op)
                if maker is not None and maker != own:
                    leaving[maker][tensor.name] = num_bytes(tensor)
        handles: dict[str, list[str]] = defaultdict(list)
        shared: dict[str, set[str]] = defaultdict(set)
        for handle, readers in holders.items():
            # What reads a layer's variable from outside (a penalty, say) does not tie the layer.
            layers = _innermost(readers, parents)
            handles[layers[0]].append(handle)
            if len(layers) > 1:
                for name in layers:
                    shared[name].add(handle)
        for tie, tied in ties.items():
            for handle in tied:
                for name in _innermost(holders[handle], parents):
                    shared[name].add(tie)
        # A loop is where its variables are. A layer that is a loop over those within is not opened.
        whole = {
            own
            for own, taken in takers.items()
            if own and taken.issuperset(_within(own, handles, parents))
        }
        return cls(
            {name: list(found) for name, found in children.items()},
            operations,
            orders,
            {handle: variable_bytes(trace.captured[handle]) for handle in holders},
            handles,
            shared,
            {name: sum(found.values()) for name, found in leaving.items()},
            whole,
        )

    def tree(self, optimize: str) -> Unit:
        """Returns the layers as the partitioner takes them.

        Args:
            optimize: ``memory`` balances the bytes of variables, ``speed`` operations and numbers
                of variables.
        """

        def unit(name: str) -> Unit:
            sizes = [self.bytes_of[each] for each in self.handles.get(name, ())]
            return Unit(
                name,
                compute=len(self.operations.get(name, ())),
                memory=sum(sizes) if optimize == "memory" else len(sizes),
                order=self.orders.get(name, 0),
                shared=frozenset(self.shared.get(name, ())),
                children=tuple(unit(child) for child in self.children.get(name, ())),
                output_bytes=self.output_bytes.get(name, 0),
                splittable=name not in self.whole,
            )

        return unit("")


def _within(
    outer: str, handles: Mapping[str, Sequence[str]], parents: Mapping[str, str]
) -> Iterator[str]:
    """Yields the handles of the variables of a layer and of those in it."""
    for name, own in handles.items():
        at = name
        while at and at != outer:
            at = parents[at]
        if at == outer:
            yield from own


def _innermost(names: Iterable[str], parents: Mapping[str, str]) -> list[str]:
    """Returns those layers that contain none of the others."""
    names = list(names)
    outer: set[str] = set()
    for name in names:
        while name:
            name = parents[name]
            outer.add(name)
    return [name for name in names if name not in outer]
