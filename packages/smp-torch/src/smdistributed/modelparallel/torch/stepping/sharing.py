"""Giving every rank of a pipeline what the microbatches return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.execute.late_values import late_value
from smdistributed.modelparallel.torch.execute.links import Links
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import Value
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber
from smdistributed.modelparallel.torch.record.trace.buffers import KeptBuffer
from smdistributed.modelparallel.torch.record.trace.replicated import evaluate_replicated
from smdistributed.modelparallel.torch.tensors.nested import fill


def share_results(
    links: Links,
    pp_rank: int,
    device: torch.device,
    passed: Sequence[Passed],
    inputs: Sequence[Sequence[torch.Tensor]],
    made: Sequence[Mapping[int, torch.Tensor]],
) -> tuple[list[Any], list[dict[int, torch.Tensor]]]:
    """Returns the result of each microbatch with its tensors in place. Collective: PP_GROUP.

    And what has become of the arguments that it changed in place, by their positions.

    Shape: those that the body returned, whole and the same on every rank of the pipeline.

    Args:
        links: to the other ranks of the pipeline.
        pp_rank: of this rank.
        device: where tensors are received.
        passed: each microbatch.
        inputs: the tensor arguments and constants of each microbatch.
        made: the returned tensors of each microbatch that this rank made, by number of the value.
    """
    plans = [each.plan for each in passed]
    found = [dict(each) for each in made]
    batches: dict[tuple[Any, ...], list[tuple[int, Value]]] = {}
    for m, plan in enumerate(plans):
        for value in dict.fromkeys((*plan.graph.returned, *plan.late.shared)):
            owner = plan.late.homes[value] if value in plan.late.homes else plan.owner(value)
            if value.replicated:
                found[m][value.index] = evaluate_replicated(_itself, (value,), {}, inputs[m])
            elif owner is not None:
                if value in plan.late.homes and owner == pp_rank:
                    found[m][value.index] = late_value(plan, value, found[m], inputs[m])
                alike = (owner, value.shape, value.dtype, value.order)
                batches.setdefault(alike, []).append((m, value))
    for (owner, *_), members in batches.items():
        m, value = members[0]
        batch = _stacked(members, found) if owner == pp_rank else _buffer(members, device)
        links.broadcast(batch, owner)
        for (m, value), tensor in zip(members, batch.unbind(), strict=True):
            found[m][value.index] = value.from_wire(tensor)
    for m, plan in enumerate(plans):
        for value, home in plan.late.homes.items():
            if home is None:
                found[m][value.index] = late_value(plan, value, found[m], inputs[m])
    # The last microbatch that stored something in a place, or changed a buffer, has it there.
    kept: dict[Slot, torch.Tensor] = {}
    for each, values in reversed(list(zip(passed, found, strict=True))):
        for stored in each.stored:
            stored.fill(values)
        for (module, name), buffer in each.graph.buffers.items():
            kept.setdefault((module, name), values[buffer.value.index])
    for slot, tensor in kept.items():
        KeptBuffer(*slot)(tensor)
    written = [
        {position: values[value.index] for position, value in plan.graph.written.items()}
        for plan, values in zip(plans, found, strict=True)
    ]
    return [_filled(*each) for each in zip(passed, found, strict=True)], written


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _stacked(
    members: Sequence[tuple[int, Value]], found: Sequence[Mapping[int, torch.Tensor]]
) -> torch.Tensor:
    """Returns tensors of one shape, one a microbatch, as one message."""
    return torch.stack([value.wire(found[m][value.index]) for m, value in members])


def _buffer(members: Sequence[tuple[int, Value]], device: torch.device) -> torch.Tensor:
    one = members[0][1].wire_buffer(device)
    return one.new_empty((len(members), *one.shape))


def _filled(passed: Passed, values: Mapping[int, torch.Tensor]) -> Any:
    """Returns what the step function returned, with tensors and numbers in their places."""
    graph = passed.graph
    for number, value in zip(passed.pending, graph.numbers, strict=True):
        number.settle(values[value.index].item())
    return fill(
        passed.result,
        (Value, PendingNumber),
        lambda each: each.value() if isinstance(each, PendingNumber) else values[each.index],
    )
