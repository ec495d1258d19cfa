"""What a buffer of a split module holds when a microbatch begins, before the step has computed.

Python may ask: ``if self.step > 100``. Earlier microbatches of the step may have changed the
buffer, which is done when they are computed. What they make of it from inputs and numbers alone is
found from these; what they make of activations, nobody knows yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.questions.ahead import depends_on_values
from smdistributed.modelparallel.torch.record.trace.replicated import evaluate_replicated
from smdistributed.modelparallel.torch.tensors.nested import tensors_in


class Earlier(NamedTuple):
    """A microbatch whose Python has run.

    Attributes:
        passed: what it leaves behind.
        call: its arguments.
    """

    passed: Passed
    call: tuple[Sequence[Any], Mapping[str, Any]]


def buffer_before(
    earlier: Sequence[Earlier], real: Callable[[nn.Module, str], Any], module: nn.Module, name: str
) -> Any:
    """Returns what a buffer holds behind some microbatches.

    Args:
        earlier: the microbatches, in their order.
        real: returns what it held before the step.
        module, name: of the buffer.

    Raises:
        UnsupportedError: one of them makes it of activations.
    """
    for position in reversed(range(len(earlier))):
        passed, call = earlier[position]
        changed = passed.graph.buffers.get((module, name))
        if changed is None or changed.is_same:
            continue
        if changed.known is None:
            raise depends_on_values(
                f"{type(module).__name__}.{name}",
                "an earlier microbatch of the step makes the buffer of activations",
            )

        def before(module: nn.Module, name: str, position: int = position) -> Any:
            return buffer_before(earlier[:position], real, module, name)

        inputs = [*tensors_in(call), *passed.constants_read()]
        return evaluate_replicated(_itself, (changed.known,), {}, inputs, attribute=before)
    return real(module, name)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
