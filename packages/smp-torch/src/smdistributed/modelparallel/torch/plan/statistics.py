"""Whether microbatches change statistics that others still compute gradients with.

A batch normalization that trains changes its running statistics, and one that does not computes
with them, in its backward pass too. Autograd does not see the change. In one process a microbatch
has its gradients before the next one begins; in a pipeline others run in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.planning.schedule import Kind, Schedule
from smdistributed.modelparallel.torch.plan.segments import Plan


def check_statistics(plans: Sequence[Plan], schedule: Schedule) -> None:
    """Makes sure that no microbatch changes the state of a module between two passes of another.

    Args:
        plans: the plan of each microbatch.
        schedule: the order of actions on every rank.

    Raises:
        UnsupportedError: one would.
    """
    writers = [_writers(plan) for plan in dict.fromkeys(plans)]
    if all(each == writers[0] for each in writers):
        return
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
                                raise UnsupportedError(
                                    f"microbatch {microbatch} changes the state of a "
                                    f"{type(module).__name__} in {node.name}, which microbatch "
                                    f"{earlier} does not change, but computes its gradients with "
                                    "afterwards. Let it train for all microbatches of a step, or "
                                    "for none."
                                )
                    elif action.segment in plan.backward:
                        under_way[module, microbatch] = None


def _writers(plan: Plan) -> set[nn.Module]:
    """Returns the modules that change state of their own."""
    return {module for node in plan.graph.nodes for module in node.stateful}
