"""Which backward pass of a rank is the last to add to a parameter's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from smdistributed.modelparallel.common.planning.schedule import Action
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind


def final_gradients(
    plans: Sequence[Plan], actions: Sequence[Action]
) -> list[frozenset[nn.Parameter]]:
    """Returns, for each pass that completes gradients, the parameters that no later one reaches.

    Args:
        plans: the plan of each microbatch.
        actions: those of one rank.
    """
    passes = [action for action in actions if action.kind.completes]
    last: dict[nn.Parameter, int] = {}
    for position, action in enumerate(passes):
        for parameter in parameters_of(plans[action.microbatch].segments[action.segment].nodes):
            last[parameter] = position
    completed: list[set[nn.Parameter]] = [set() for _ in passes]
    for parameter, position in last.items():
        completed[position].add(parameter)
    return [frozenset(parameters) for parameters in completed]


def parameters_of(nodes: Iterable[Node]) -> set[nn.Parameter]:
    """Returns the parameters that nodes compute with."""
    found: set[nn.Parameter] = set()
    for node in nodes:
        if node.kind is NodeKind.LEAF:
            found.update(node.target.parameters())
        elif node.kind is NodeKind.ATTRIBUTE:
            module, name = node.target
            if name in module._parameters:
                found.add(module._parameters[name])
    return found
