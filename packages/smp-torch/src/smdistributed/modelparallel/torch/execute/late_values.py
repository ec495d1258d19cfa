"""Computing what a step makes of gradients of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.ir import NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.replicated import evaluate_replicated, sources


def late_value(
    plan: Plan,
    value: Value,
    kept: Mapping[int, torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Returns what is computed from gradients.

    Args:
        plan: of the microbatch.
        value: which.
        kept: what this rank has kept for it, by the index of the value.
        inputs: the tensor arguments and constants of the microbatch.

    Raises:
        UnsupportedError: a gradient that it needs has not come.
    """
    known = {each: kept[each.index] for each in plan.late.kept if each.index in kept}
    for node in sources([value], known):
        if node.kind is NodeKind.GRADIENT:
            raise UnsupportedError(
                f"the script looks at the gradient of a result of {node.args[0].node.name}, and "
                "the backward pass does not come to it: a module does not use it, or detaches it. "
                "Look at the gradient of what the loss depends on."
            )
    given = {number: tensor for number, tensor in enumerate(inputs) if tensor is not None}
    result: torch.Tensor = evaluate_replicated(_itself, (value,), {}, given, given=known)
    return result


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
