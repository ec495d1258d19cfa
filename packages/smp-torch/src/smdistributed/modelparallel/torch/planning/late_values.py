"""Where what a step computes from gradients of activations is computed.

A gradient is where its activation is. What hooks make of it goes on from there in the backward
pass, so it is computed at that moment, of what its rank has. All else can wait until the backward
passes are over: it is computed where everything that it needs is, or, if that is on several ranks,
by each rank, of what these give the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.ir import Graph, HookedGradient, NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.replicated import sources


@dataclass
class LateValues:
    """What is computed from gradients of activations.

    Attributes:
        gradients: by the activation, what becomes of its gradient.
        kept: what the ranks that have it keep until the step is over.
        homes: by each late value that the step gives, the rank that computes it; None: each.
        shared: what late values need that all ranks compute.
    """

    gradients: dict[Value, HookedGradient] = field(default_factory=dict)
    kept: set[Value] = field(default_factory=set)
    homes: dict[Value, int | None] = field(default_factory=dict)
    shared: list[Value] = field(default_factory=list)

    def needed(self) -> list[Value]:
        """Returns the values that are computed late, on some rank."""
        return [*self.homes, *(each.final for each in self.gradients.values())]


def late_values(graph: Graph, rank_of: Callable[[Value], int]) -> LateValues:
    """Plans what a step computes from gradients of activations.

    Args:
        graph: cut into segments.
        rank_of: where a value is that is no late one.

    Raises:
        UnsupportedError: it cannot be computed where it would have to be, or when.
    """
    found = LateValues()
    for each in graph.gradients:
        _check(each, graph)
        if each.final is not each.given:
            needed = _needed([each.final])
            _check_here(each, needed, found, rank_of)
            found.kept.update(needed)
        found.gradients[each.of] = each
    for value in graph.returned:
        if not value.node.late:
            continue
        needed = _needed([value])
        ranks = {rank_of(each) for each in needed}
        found.homes[value] = min(ranks) if len(ranks) == 1 else None
        if len(ranks) > 1:
            _check_travels(needed)
            found.shared += [each for each in needed if each not in found.shared]
        found.kept.update(needed)
    _check_unchanged(found.kept)
    return found


def _needed(values: Iterable[Value]) -> list[Value]:
    """Returns what late values are computed from, and what no rank can compute again."""
    found: dict[Value, None] = {}
    seen: set[Value] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.node
        if node.kind is NodeKind.GRADIENT or not (node.late or value.replicated):
            found[value] = None
        elif node.late:
            pending += node.inputs
            pending += [each.source for each in node.outputs if isinstance(each.source, Value)]
    return list(found)


def _check(each: HookedGradient, graph: Graph) -> None:
    """Makes sure that one backward pass comes to an activation, and that it stays as it is.

    Raises:
        UnsupportedError: else.
    """
    name = each.of.node.name
    roots = [root for root in graph.roots if each.of.node in _differentiated(root)]
    if len(roots) != 1 or sum(other.of is each.of for other in graph.gradients) > 1:
        raise UnsupportedError(
            f"a hook, or the script, looks at the gradient of a result of {name}, and several "
            "model.backward of one microbatch come to it: a pipeline has one backward pass for all "
            "of them. Add the losses up, and call model.backward once."
        )
    if each.of.node.region is not None:
        raise UnsupportedError(
            f"a hook, or the script, looks at the gradient of a result of {name}, in a "
            "checkpointed call that is split over partitions. Look at the gradient of what the "
            "call returns, or do it inside one module."
        )
    if each.of.is_changed:
        raise UnsupportedError(
            f"a hook, or the script, looks at the gradient of a result of {name}, which is changed "
            "in place. Use the out-of-place operation (nn.ReLU(inplace=False), say), or do it "
            "inside one module."
        )


def _differentiated(root: Value) -> set[object]:
    """Returns the nodes that the gradient of a root comes to."""
    found: set[object] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if value.node not in found and value.requires_grad:
            found.add(value.node)
            pending += [*value.node.inputs, *value.node.changed_views]
    return found


def _check_here(
    hooked: HookedGradient,
    needed: Sequence[Value],
    before: LateValues,
    rank_of: Callable[[Value], int],
) -> None:
    """Makes sure that what a hook gives can be computed when the backward pass comes to it.

    Raises:
        UnsupportedError: what it needs is elsewhere, or later.
    """
    here = rank_of(hooked.of)
    known = {hooked.given, *(each.given for each in before.gradients.values())}
    for value in needed:
        is_late = value.node.kind is NodeKind.GRADIENT and value not in known
        if rank_of(value) != here or is_late:
            what = value.node.args[0] if value.node.kind is NodeKind.GRADIENT else value
            raise UnsupportedError(
                f"a hook changes the gradient of a result of {hooked.of.node.name}, on partition "
                f"{here}, by a tensor of {what.node.name or 'the model'}, on partition "
                f"{rank_of(value)}, which is not there when the backward pass comes to it. Put "
                "the modules on one partition, or use the tensor in the forward pass."
            )


def _check_travels(needed: Sequence[Value]) -> None:
    for value in needed:
        if value.node.kind is NodeKind.ATTRIBUTE:
            raise UnsupportedError(
                f"{value.node.name} is used with gradients of activations of other partitions, "
                "while a pipelined step runs. Return these from the step function, and compute "
                "with the parameter after the call."
            )


def _check_unchanged(kept: Iterable[Value]) -> None:
    for value in kept:
        if value.is_changed and value.node.kind is not NodeKind.GRADIENT:
            raise UnsupportedError(
                f"a result of {value.node.name or 'the model'} is used with the gradient of an "
                "activation, and is changed in place in the forward pass. Use the out-of-place "
                "operation."
            )


def inputs_of(values: LateValues) -> set[int]:
    """Returns the positions of the step's tensor arguments that they are made of."""
    nodes = sources(values.needed(), values.kept)
    return {node.target for node in nodes if node.kind is NodeKind.INPUT}
