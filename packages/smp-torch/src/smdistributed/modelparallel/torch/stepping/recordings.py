"""The recordings of a step function, and which of them fits a microbatch.

A recording fits a call of its kind while the Python state that it read is unchanged and the
questions that it asked about its inputs have the same answers. Rank 0 of the pipeline decides; the
others follow, and check that their own state allows it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.plan.segments import Plan, cut
from smdistributed.modelparallel.torch.record.capture import Capture, capture
from smdistributed.modelparallel.torch.record.decisions import GivenDecisions, OwnDecisions
from smdistributed.modelparallel.torch.record.leaf_memory import LeafMemory
from smdistributed.modelparallel.torch.record.nested import tensors_in
from smdistributed.modelparallel.torch.record.replicated import evaluate_replicated
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import (
    Call,
    CallKind,
    Header,
    MiniBatch,
    State,
    TensorKind,
)
from smdistributed.modelparallel.torch.stepping.first_rank import Heard, say

logger = logging.getLogger(__name__)

#: Recordings kept for one kind of microbatch.
_MOST_RECORDINGS = 8
#: Kinds of microbatches that are remembered; a script may pass a new object in each step.
_MOST_KINDS = 64
#: Plans kept in all: state that changes in every step makes a new one each time.
_MOST_PLANS = 64


@dataclass
class Recording:
    """One way in which a microbatch can go.

    Attributes:
        capture: the graph and the Python state that it depends on.
        answers: to its questions about inputs.
        order: the names of its nodes, in the order of rank 0 of the pipeline.
        plan: the graph, cut; shared with other recordings that do the same.
        reached: the models that ``backward`` was called on.
    """

    capture: Capture
    answers: Sequence[Any]
    order: Sequence[str]
    plan: Plan
    reached: tuple[DistributedModel, ...]

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether its questions have the same answers for a microbatch of real inputs."""
        return all(
            evaluate_replicated(guard.function, guard.args, guard.kwargs, inputs) == guard.expected
            for guard in self.capture.graph.guards
        )


@dataclass
class _Known:
    """The recordings of one kind of microbatch, oldest first; the same list on every rank."""

    recordings: list[Recording] = field(default_factory=list)


class Recordings:
    """The recordings of one step function.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        recording: a context in which the function may be run on fakes; given a list that
            ``backward`` adds the differentiated models to.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        function: Callable[..., Any],
        recording: Callable[[], Any],
    ) -> None:
        self._runtime = runtime
        self._function = function
        self._recording = recording
        self._is_first = runtime.coordinates.pp_rank == 0
        self._known: dict[tuple[object, ...], _Known] = {}
        self._memories: dict[State, LeafMemory] = {}
        self._plans: OrderedDict[str, list[Plan]] = OrderedDict()
        self._warned: set[str] = set()

    def _of(self, kind: CallKind, own: tuple[object, ...], call: Call) -> _Known:
        tensors = tuple(TensorKind.of(tensor) for tensor in tensors_in(call))
        return self._known.setdefault((kind.constants, own, kind.state, tensors), _Known())

    def choose(
        self, kind: CallKind, own: Sequence[tuple[object, ...]], calls: Sequence[Call]
    ) -> tuple[int | None, ...]:
        """Returns which recording fits each microbatch; None where none does.

        Args:
            kind: of the whole call.
            own: what each microbatch has of its own besides tensors.
            calls: the microbatches, with real inputs.
        """
        stale: dict[int, bool] = {}
        return tuple(
            self._choose(self._of(kind, mine, call), call, stale)
            for mine, call in zip(own, calls, strict=True)
        )

    def _choose(self, known: _Known, call: Call, stale: dict[int, bool]) -> int | None:
        inputs = tensors_in(call)
        for index in reversed(range(len(known.recordings))):
            recording = known.recordings[index]
            key = id(recording)
            if key not in stale:
                stale[key] = recording.capture.stale() is not None
            if not stale[key] and recording.fits(inputs):
                return index
        return None

    def find(self, batch: MiniBatch) -> list[Recording]:
        """Returns the recording of each microbatch; makes those that are missing.

        Collective: PP_GROUP.

        Raises:
            SMPError: the ranks recorded different code.
        """
        header, calls = batch.header, batch.calls
        choices = list(header.choices)
        checked: set[int] = set()
        found: list[Recording] = []
        made: list[Recording] = []
        for position, call in enumerate(calls):
            known = self._of(header.kind, header.own[position], call)
            choice = choices[position]
            if choice is not None:
                if not self._is_first and id(known.recordings[choice]) not in checked:
                    self._follow(known, choice, header.kind, call)
                    checked.add(id(known.recordings[choice]))
                found.append(known.recordings[choice])
                continue
            self._runtime.random.begin(header.seed, rehearsal=True)
            self._runtime.random.enter_pass(position, backward=False)
            recording = self._make(known, header, calls, position, choices)
            found.append(recording)
            made.append(recording)
        if made:
            self._compare([recording.plan for recording in made])
            for own, call in zip(header.own, calls, strict=True):
                # Only now: numbers of recordings are agreed for a whole call.
                del self._of(header.kind, own, call).recordings[:-_MOST_RECORDINGS]
            for kind in list(self._known)[:-_MOST_KINDS]:
                del self._known[kind]
        return found

    def _make(
        self,
        known: _Known,
        header: Header,
        calls: Sequence[Call],
        position: int,
        choices: list[int | None],
    ) -> Recording:
        """Records a microbatch, and learns which recordings the following ones take."""
        communicator = self._runtime.communicator
        if self._is_first:
            made: list[Recording] = []

            def answer() -> tuple[Any, ...]:
                own = OwnDecisions()
                recording = self._record(header.kind, calls[position], own)
                made.append(recording)
                reusable = recording.capture.changes is None
                if reusable:
                    known.recordings.append(recording)
                    self._choose_following(header, calls, position, choices)
                else:
                    self._note(recording.capture.changes)
                return own.answers, recording.order, reusable, choices

            say(communicator, answer)
            return made[0]
        heard = Heard(communicator)
        decisions = GivenDecisions(lambda: heard()[0])
        try:
            recording = self._record(header.kind, calls[position], decisions, lambda: heard()[1])
        except Exception:
            heard()  # stays in step with rank 0, and raises its reason if it has one
            raise
        _, _, reusable, choices[:] = heard()
        if reusable:
            known.recordings.append(recording)
        return recording

    def _choose_following(
        self,
        header: Header,
        calls: Sequence[Call],
        position: int,
        choices: list[int | None],
    ) -> None:
        """Finds out which microbatches after ``position`` a new recording fits, up to a miss."""
        stale: dict[int, bool] = {}
        for later in range(position + 1, len(calls)):
            if choices[later] is None:
                known = self._of(header.kind, header.own[later], calls[later])
                choices[later] = self._choose(known, calls[later], stale)
                if choices[later] is None:
                    return

    def _note(self, changes: str | None) -> None:
        if changes is not None and changes not in self._warned:
            self._warned.add(changes)
            logger.info(
                "the step function changes %s itself, so it is recorded again for every "
                "microbatch; that costs some milliseconds each.",
                changes,
            )

    def _record(
        self,
        kind: CallKind,
        call: Call,
        decisions: OwnDecisions | GivenDecisions,
        order: Callable[[], Sequence[str]] | None = None,
    ) -> Recording:
        runtime = self._runtime
        models = [model for model in models_of(runtime) if model.partitioned]
        leaves = {
            module: leaf
            for model in models
            for module, leaf in model.holder.placement.leaves.items()
        }
        memory = self._memories.setdefault(kind.state, LeafMemory())
        with self._recording() as (on_start, reached):
            captured = capture(
                [model.holder.fakes for model in models],
                self._function,
                *call,
                runtime.fake_mode,
                runtime.device,
                leaves,
                decisions,
                runtime.random,
                memory,
                on_start,
            )
        for model in models:
            model.drawing.take(captured.profile)
        if order is not None:
            captured.graph.put_in_order(order())
        names = captured.graph.names()
        plan = self._plan(models, captured)
        return Recording(captured, decisions.answers, names, plan, tuple(reached))

    def _plan(self, models: Sequence[DistributedModel], captured: Capture) -> Plan:
        """Cuts a graph, or returns the plan of one that does the same."""
        text = captured.graph.digest()
        alike = self._plans.setdefault(text, [])
        self._plans.move_to_end(text)
        for plan in alike:
            if plan.graph.does_as(captured.graph):
                return plan
        partition_of = {
            module: partition
            for model in models
            for module, partition in model.holder.placement.partition_of.items()
        }

        def owner_of(slot: Any) -> int:
            for model in models:
                if slot in model.holder.fakes.slots:
                    return model.holder.placement.owner_of(slot)
            raise AssertionError("a recorded parameter belongs to no model")

        plan = cut(captured.graph, partition_of, owner_of)
        alike.append(plan)
        while len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _follow(self, known: _Known, choice: int, kind: CallKind, call: Call) -> None:
        """Checks that rank 0's choice is right here too; records it again where state changed.

        Raises:
            SMPError: this rank would do something else.
        """
        recording = known.recordings[choice]
        changed = recording.capture.stale()
        if changed is None:
            return
        decisions = GivenDecisions(lambda: recording.answers)
        again = self._record(kind, call, decisions, lambda: recording.order)
        if again.plan is not recording.plan:
            raise SMPError(
                f"rank {self._runtime.rank}: {changed} has changed here since the step was "
                "recorded, so that the step would do something else, but not on the first rank of "
                "the pipeline. Change it on every rank."
            )
        known.recordings[choice] = again

    def _compare(self, plans: Sequence[Plan]) -> None:
        """Makes sure that all ranks of the pipeline recorded the same. Collective: PP_GROUP."""
        communicator = self._runtime.communicator
        digests = [plan.digest() for plan in plans]
        ranks = self._runtime.topology.members(CommGroup.PP_GROUP, self._runtime.rank)
        if len({tuple(each) for each in communicator.allgather(digests, CommGroup.PP_GROUP)}) == 1:
            return
        everything = communicator.allgather([plan.lines() for plan in plans], CommGroup.PP_GROUP)
        first = [line for lines in everything[0] for line in lines]
        for rank, theirs in zip(ranks, everything, strict=True):
            lines = [line for lines in theirs for line in lines]
            if lines == first:
                continue
            mine, other = next(
                (pair for pair in zip(first, lines, strict=False) if pair[0] != pair[1]),
                (f"{len(first)} nodes", f"{len(lines)} nodes"),
            )
            raise SMPError(
                "the ranks of the pipeline recorded different computations. Every rank must run "
                f"the same code with the same settings; the first difference: rank {ranks[0]}: "
                f"{mine}; rank {rank}: {other}."
            )
