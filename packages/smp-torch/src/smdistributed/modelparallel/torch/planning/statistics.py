"""Whether microbatches change statistics that others still compute gradients with.

A batch normalization that trains changes its running statistics, and one that does not computes
with them, in its backward pass too, and when it is computed once more. Autograd does not see the
change. In one process a microbatch has its gradients before the next one begins; in a pipeline
others run in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from smdistributed.modelparallel.common.planning.schedule import Kind, Schedule
from smdistributed.modelparallel.torch.planning.segments import Plan


def statistics_in_turn(plans: Sequence[Plan], schedule: Schedule) -> list[str]:
    """Says where a microbatch changes the state of a module between two passes of another.

    Args:
        plans: the plan of each microbatch.
        schedule: the order of actions on every rank.
    """
    writers = [_writers(plan) for plan in dict.fromkeys(plans)]
    if all(each == writers[0] for each in writers):
        return []
    found: dict[str, None] = {}
    written = set[nn.Module]().union(*writers)
    for actions in schedule.ranks:
        #: (module, microbatch) between the forward and the backward pass.
        under_way: dict[tuple[nn.Module, int], None] = {}
        for action in actions:
            plan, microbatch = plans[action.microbatch], action.microbatch
            if action.kind is Kind.WEIGHT_GRADIENTS:
                continue
            for node in plan.segments[action.segment].nodes:
                for module in written.intersection(node.modules):
                    if action.kind is not Kind.FORWARD:
                        under_way.pop((module, microbatch), None)
                    elif module in node.stateful:
                        for other, earlier in under_way:
                            if other is module and earlier != microbatch:
                                found[
                                    f"a {type(module).__name__} in {node.name} changes its state "
                                    "for some microbatches, which others compute gradients with"
                                ] = None
                    elif action.segment in plan.backward or node in plan.comes_again:
                        under_way[module, microbatch] = None
    return list(found)


def _writers(plan: Plan) -> set[nn.Module]:
    """Returns the modules that change state of their own."""
    return {module for node in plan.graph.nodes for module in node.stateful}
