"""Recording one microbatch of a user's step function as a graph.

The user's function runs once on fake tensors, on every rank alike, without communication. Calls of
modules that sit whole on one partition become leaves; torch functions called between them become
glue. Everything else that Python does in the function is not recorded: it happened once, here, and
its results are constants of the graph, good while the Python state that it read stays as it was.
What cannot be recorded soundly raises.

Two runs serve two purposes: ``profile`` records nothing at module level but measures each module,
for the partitioner; ``capture`` records the graph along a partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private import FakeTensor, FakeTensorMode
from smdistributed.modelparallel.torch.record.carried import tensors_held
from smdistributed.modelparallel.torch.record.costs import Profile
from smdistributed.modelparallel.torch.record.decisions import Decisions
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.record.ir import Graph, Leaf
from smdistributed.modelparallel.torch.record.leaf_memory import LeafMemory
from smdistributed.modelparallel.torch.record.modules import Randomness
from smdistributed.modelparallel.torch.record.nested import template
from smdistributed.modelparallel.torch.record.pending import NumberParts, PendingNumber
from smdistributed.modelparallel.torch.record.python_state import StateWatch
from smdistributed.modelparallel.torch.record.recorder import Recorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capture:
    """A recorded microbatch.

    Attributes:
        graph: what it does.
        watches: the Python state that it read.
        changes: what it changed or consumed of that state itself, so that it must be recorded
            again each time; None if nothing.
        profile: of the modules that ran on fakes; of a remembered leaf only itself.
        pending: the numbers that were taken from activations, in the order of ``graph.numbers``.
    """

    graph: Graph
    watches: Sequence[StateWatch]
    changes: str | None
    profile: Profile
    pending: Sequence[PendingNumber]

    def stale(self) -> str | None:
        """Returns the name of some Python state that has changed since, or None."""
        return next((name for watch in self.watches for name in watch.changes()), None)


def profile(
    models: Sequence[FakeModel],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    device: torch.device,
    decisions: Decisions,
    random: Randomness,
) -> Profile:
    """Runs one microbatch on fakes, measures every module on the way, and leaves no trace.

    Args:
        models: all models that the function may call.
        function: the user's step function.
        args, kwargs: one microbatch of its arguments.
        mode: the fake mode of the models' fakes.
        device: where the step will run.
        decisions: answers questions about data.
        random: the random numbers of the step.
    """
    recorder = Recorder(models, mode, device, None, decisions, random)
    try:
        recorder.run(function, args, kwargs)
    finally:
        recorder.watch.restore()
        recorder.watch.restore_random()
    return recorder.profile


def capture(
    models: Sequence[FakeModel],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    device: torch.device,
    leaves: Mapping[nn.Module, Leaf],
    decisions: Decisions,
    random: Randomness,
    memory: LeafMemory | None = None,
    on_start: Callable[[Recorder], None] = lambda recorder: None,
) -> Capture:
    """Runs one microbatch on fakes and records it.

    What the function changes in Python stays changed, as if it had run for real.

    Args:
        models: all models that the function may call.
        function: the user's step function.
        args, kwargs: one microbatch of its arguments; tensors may be fake already.
        mode: the fake mode of the models' fakes.
        device: where the step will run.
        leaves: the modules to record as one opaque call, with their names; of nested ones, the
            outermost that is called.
        decisions: answers questions about data.
        random: the random numbers of the step.
        memory: what leaves returned in earlier recordings under the same flags.
        on_start: told the recorder, so that ``model.backward`` finds it.

    Raises:
        UnsupportedError: the function does something that a replay could not repeat.
    """
    recorder = Recorder(models, mode, device, leaves, decisions, random, memory)
    on_start(recorder)
    result = recorder.run(function, args, kwargs)
    graph = recorder.graph

    def returned(obj: Any) -> Any:
        if isinstance(obj, PendingNumber):
            return NumberParts(obj, recorder.value)
        return _returned_object(obj)

    graph.result = template(result, recorder.value, returned)
    graph.numbers = [
        recorder.value(number.tensor) for number in recorder.pending if number.tensor is not None
    ]
    recorder.check_rebound_buffers()
    changes = recorder.watch.changed() or recorder.decided_by or recorder.watch.random_consumed()
    _settle_strays(recorder)
    watches = (recorder.watch, *recorder.leaf_watches)
    return Capture(graph, watches, changes, recorder.profile, recorder.pending)


def _returned_object(obj: Any) -> Any:
    """Returns what the user gets for an object that the step function returned."""
    if not any(True for _ in tensors_held(obj)):
        return obj
    logger.warning(
        "the step function returned an object of class %s, whose tensors are spread over the "
        "partitions; None is returned in its place.",
        type(obj).__qualname__,
    )
    return None


def _settle_strays(recorder: Recorder) -> None:
    """Replaces fakes that the function stored somewhere by real tensors, or refuses them."""
    for place, holder, key, fake in recorder.watch.stray_tensors(FakeTensor):
        real = recorder.constant(fake)
        if real is None or not isinstance(holder, dict | list):
            raise UnsupportedError(
                f"the step function, or the forward of a module that is split over partitions, "
                f"stored a tensor in {place}. A pipelined step computes it elsewhere, so only a "
                "stand-in is here: return the tensor instead, or put the module on one partition."
            )
        holder[key] = real
