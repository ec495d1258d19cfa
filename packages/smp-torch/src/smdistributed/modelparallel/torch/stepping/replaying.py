"""Mini-batches of a pipeline that run as CUDA graphs.

Each rank decides for itself, since what goes between the ranks of a pipeline is the same either
way; those of a tensor-parallel group, whose modules exchange within a pass, decide together.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from smdistributed.modelparallel.common.planning.schedule import Kind as ActionKind
from smdistributed.modelparallel.torch.execute.captured import capture
from smdistributed.modelparallel.torch.execute.executor import EnterPass
from smdistributed.modelparallel.torch.execute.graphs import Graphs
from smdistributed.modelparallel.torch.execute.passes import Computation, Inputs
from smdistributed.modelparallel.torch.execute.replay import Replay
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.execute.surroundings import takes_part
from smdistributed.modelparallel.torch.execute.taped_runs import TapedRuns
from smdistributed.modelparallel.torch.execute.taping import TapedComputation, Tapes
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.random.keys import CapturedDraws
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import MiniBatch
from smdistributed.modelparallel.torch.stepping.captures import Captures, Due, Kind, graphs_for
from smdistributed.modelparallel.torch.stepping.head_start import HeadStart
from smdistributed.modelparallel.torch.stepping.preparing import Prepared
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec


@dataclass(eq=False)
class _Kind(Kind[Tapes, Replay]):
    """What is known of one kind of mini-batch.

    Attributes:
        read: for each microbatch, the positions of the tensors that it reads.
        draws: how often random numbers were drawn in each pass, when it was taken down.
    """

    read: list[set[int]] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)


class Replays:
    """The captured mini-batches of one step function.

    Args:
        runtime: the state of the library in this process.
        graphs: capture passes.
        name: of the step function, for messages.
        is_asked_for: the script did; else it is not told of each mini-batch that runs as it is, and
            passes are captured only where there is much room.
        runs: compile what lies between products of passes.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        graphs: Graphs,
        name: str,
        *,
        is_asked_for: bool,
        runs: TapedRuns,
    ) -> None:
        self._runtime = runtime
        self._runs = runs
        self._graphs = graphs
        self._captures = Captures[Tapes, Replay](
            graphs,
            runtime.tensor_group,
            name,
            runtime.rank,
            runtime.device,
            is_asked_for=is_asked_for,
        )
        self._head_start = HeadStart(runtime)
        self._kinds: weakref.WeakKeyDictionary[Prepared, _Kind] = weakref.WeakKeyDictionary()

    def start(self, batch: MiniBatch) -> None:
        """Starts a mini-batch before its Python has run, if it is likely to run as the last one."""
        self._head_start.begin(batch)

    def let_go(self) -> None:
        """Lets go of what was captured."""
        self._kinds.clear()
        self._head_start.let_go()

    def of(
        self,
        batch: MiniBatch,
        prepared: Prepared,
        models: Sequence[DistributedModel],
        inputs: Inputs,
        scales: Sequence[Scale],
        enter_pass: EnterPass,
    ) -> Replay | Computation:
        """Returns what runs a mini-batch, with its tensors: as captured, or as it is.

        Collective: TP_GROUP.

        Args:
            batch: the mini-batch.
            prepared: its kind.
            models: whose modules it calls.
            inputs: of its microbatches.
            scales: by what their losses count.
            enter_pass: called before each action that is captured.
        """
        if (kind := self._kinds.get(prepared)) is None:
            kind = self._kinds[prepared] = self._new_kind(prepared)
        read = [
            [each if position in read else None for position, each in enumerate(one)]
            for one, read in zip(inputs, kind.read, strict=True)
        ]
        parameters = (
            [each for model in models for _, each in model.local_named_parameters()]
            if prepared.differentiated
            else []
        )
        runtime = self._runtime

        def captured(tapes: Tapes) -> Replay:
            final = iter(prepared.final_gradients)
            foreseen = [each for model in models for each in model.data_parallel.foresee()]

            def enter_captured(kind: ActionKind, microbatch: int) -> None:
                enter_pass(kind, microbatch)
                completes = next(final) if kind.completes else frozenset()
                for each in foreseen:
                    each.enter_pass(completes)

            found = capture(
                self._graphs,
                prepared.passes,
                tapes,
                read,
                scales,
                parameters,
                [CapturedDraws(runtime.random, count) for count in kind.draws],
                runtime.random,
                runtime.tensor_group,
                enter_captured,
                foreseen,
                self._runs,
                reuses_memory=runtime.links.lays_messages,
            )
            return Replay(found, parameters, runtime.random, runtime.tensor_group)

        due = Due(
            parameters,
            [each for one in read for each in one if each is not None],
            around=takes_part(),
            adds_up=lambda: any(each.grad is not None for each in parameters),
            refusal=lambda tapes: next(filter(None, (each.refusal for each in tapes.values())), ""),
            fits=lambda replay: replay.fits(read, scales),
            capture=captured,
        )
        replay = self._captures.decide(kind, due)
        if replay is not None:
            replay.begin(read, scales, is_started=self._head_start.was_for(batch, replay))
            self._head_start.expect(batch, prepared, models, replay, parameters)
            return replay
        if kind.is_taken_down:
            specs = {tuple(map(_spec_of, one)) for one in read}
            return TapedComputation(
                prepared.passes,
                read,
                scales,
                runtime.random,
                runtime.fake_mode,
                # Once that they are was not borne out, each is taken down.
                are_alike=kind.captures == 0 and len({*prepared.plans}) == len(specs) == 1,
            )
        return Computation(prepared.passes, inputs, scales)

    def _new_kind(self, prepared: Prepared) -> _Kind:
        rank = self._runtime.coordinates.pp_rank
        nodes = {plan: _nodes(plan, rank) for plan in prepared.plans}
        deciding = [node for each in nodes.values() for node in each if node.decides]
        why_not = f"{deciding[0].name} decides by numbers" if deciding else ""
        if any(plan.late.gradients for plan in prepared.plans):
            why_not = "the script looks at gradients of activations"
        if any(node.beside is not None for each in nodes.values() for node in each):
            why_not = "the script asks for gradients that pass through several partitions"
        return _Kind(
            why_not=why_not,
            read=[_read(nodes[plan]) for plan in prepared.plans],
        )

    def note(self, prepared: Prepared, computation: Computation) -> None:
        """Takes note of a mini-batch that ran as it is."""
        kind = self._kinds.get(prepared)
        if kind is not None and isinstance(computation, TapedComputation):
            kind.draws, kind.tapes = self._runtime.random.draws, computation.tapes


def replays_of(
    runtime: TorchRuntime,
    name: str,
    cuda_graphs: bool | Literal["auto"],
    runs: TapedRuns,
) -> Replays | None:
    """Returns the captured mini-batches of a step function; None where none are captured.

    Args:
        runtime: the state of the library in this process; there are several partitions.
        name: of the step function.
        cuda_graphs: whether the script asks for them.
        runs: see ``Replays``.
    """
    reason = "parameters are in shards" if runtime.config.sharded_data_parallel_degree > 1 else ""
    graphs = graphs_for(runtime, name, cuda_graphs, reason)
    if graphs is None:
        return None
    return Replays(runtime, graphs, name, is_asked_for=cuda_graphs is True, runs=runs)


def _spec_of(tensor: torch.Tensor | None) -> TensorSpec | None:
    return None if tensor is None else TensorSpec.of(tensor)


def _nodes(plan: Plan, pp_rank: int) -> list[Node]:
    """Returns what a rank computes of a microbatch."""
    return [node for each in plan.segments if each.rank == pp_rank for node in each.nodes]


def _read(nodes: Sequence[Node]) -> set[int]:
    """Returns the positions of the tensors, those of the call and behind them, that nodes read."""
    kinds = (NodeKind.INPUT, NodeKind.CONSTANT)
    return {node.target for node in nodes if node.kind in kinds and isinstance(node.target, int)}
