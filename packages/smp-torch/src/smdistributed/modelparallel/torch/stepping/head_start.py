"""The first action of a mini-batch that runs as captured, done before its Python has run.

The Python of all microbatches takes a while, in which the device of the first rank would have
nothing to do. If a mini-batch is called as the last one was, what that did first is done at once.
Nobody sees it: it writes to the memory of its graph alone. It counts if the mini-batch turns out to
be of that kind, once its Python has run; otherwise it was done in vain.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.torch.execute.executor import Executor
from smdistributed.modelparallel.torch.execute.replay import Replay
from smdistributed.modelparallel.torch.execute.surroundings import takes_part
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.record.ir import NodeKind
from smdistributed.modelparallel.torch.record.trace.buffers import KeptBuffer
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import CallKind, MiniBatch
from smdistributed.modelparallel.torch.stepping.preparing import Prepared
from smdistributed.modelparallel.torch.tensors.nested import tensors_in


@dataclass
class _Expected:
    """A mini-batch that ran as captured.

    Attributes:
        kind: of its call.
        executor: of it.
        replay: what ran.
        parameters: that got gradients.
    """

    kind: CallKind
    executor: Executor
    replay: Replay
    parameters: Sequence[nn.Parameter]


class HeadStart:
    """The first actions of one step function, on one rank.

    Args:
        runtime: the state of the library in this process.
    """

    def __init__(self, runtime: TorchRuntime) -> None:
        # Others wait for the first rank of their pipeline, or for each other in every action.
        is_first = runtime.coordinates.pp_rank == 0
        self._can_begin = is_first and runtime.tensor_group.size == 1
        self._expected: _Expected | None = None
        self._done: tuple[weakref.ref[MiniBatch], Replay] | None = None  # it has the user's models

    def begin(self, batch: MiniBatch) -> None:
        """Does the first action of a mini-batch, if it is likely to be that of the last one."""
        # What is dropped meanwhile must not keep its memory here while it is captured anew.
        expected, self._expected, self._done = self._expected, None, None
        if expected is None or batch.header.kind != expected.kind:
            return
        replay = expected.replay
        is_in_use = any(each.grad is not None for each in expected.parameters) or replay.is_held
        # Its parameters may lie elsewhere now: what it would read may be gone.
        if not (is_in_use or takes_part() or replay.has_moved):
            tensors = tensors_in(batch.calls[0])
            expected.executor.start(lambda: replay.start(tensors))
            self._done = weakref.ref(batch), replay

    def let_go(self) -> None:
        """Expects nothing any more."""
        self._expected = self._done = None

    def was_for(self, batch: MiniBatch, replay: Replay) -> bool:
        """Whether the first action of a mini-batch has been done."""
        return self._done is not None and self._done[0]() is batch and self._done[1] is replay

    def expect(
        self,
        batch: MiniBatch,
        prepared: Prepared,
        models: Sequence[DistributedModel],
        replay: Replay,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Takes note of a mini-batch that runs as captured.

        Args:
            batch: the mini-batch.
            prepared: its kind.
            models: whose modules it calls.
            replay: what runs.
            parameters: that get gradients.
        """
        sets_buffers = any(model.data_parallel.sets_buffers for model in models)
        if self._can_begin and not sets_buffers and _is_unseen(prepared, replay):
            executor = prepared.executor
            self._expected = _Expected(batch.header.kind, executor, replay, parameters)


def _is_unseen(prepared: Prepared, replay: Replay) -> bool:
    """Whether the first action reads arguments and parameters alone, and writes to neither."""
    itinerary = prepared.passes.itinerary
    action = itinerary.actions[0]
    plan = prepared.plans[action.microbatch]
    return (
        action.kind is Kind.FORWARD
        and action.microbatch == 0
        and not itinerary.needs[0]
        and not replay.draws_first
        and not plan.graph.written
        and not any(
            node.stateful
            or node.changes
            or node.kind is NodeKind.CONSTANT
            or isinstance(node.target, KeptBuffer)
            for node in plan.segments[action.segment].nodes
        )
    )
