"""Mini-batches that run as CUDA graphs: which, and from when on.

Each rank decides for itself, since what goes between the ranks of a pipeline is the same either
way; those of a tensor-parallel group, whose modules exchange within a pass, decide together. The
first mini-batches of a kind run as they are, which compiles and chooses kernels; the last of them
is taken down on tapes, from which the next one is captured. From then on the Python of each pass
confirms its graph.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from smdistributed.modelparallel.torch.compat.private.backward import is_accumulation_kept
from smdistributed.modelparallel.torch.execute.captured import capture
from smdistributed.modelparallel.torch.execute.executor import EnterPass
from smdistributed.modelparallel.torch.execute.graphs import Graphs, graphs_of
from smdistributed.modelparallel.torch.execute.passes import Computation, Inputs
from smdistributed.modelparallel.torch.execute.replay import Replay
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.execute.surroundings import takes_part
from smdistributed.modelparallel.torch.execute.taping import TapedComputation, Tapes
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.plan.segments import Plan
from smdistributed.modelparallel.torch.random.keys import CapturedDraws
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind
from smdistributed.modelparallel.torch.record.turns import accumulation_hooks
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import MiniBatch
from smdistributed.modelparallel.torch.stepping.head_start import HeadStart
from smdistributed.modelparallel.torch.stepping.preparing import Prepared

logger = logging.getLogger(__name__)

#: Mini-batches of a kind that run before their passes are captured; the last of them is taken down.
_FIRST = 2
#: How often those of a kind are captured, if what they rely on changes.
_MOST_CAPTURES = 4
#: Kinds whose captures are kept; each has the memory of its gradients.
_MOST_KEPT = 4
#: What a rank offers its tensor-parallel group: to run as it is, or to capture; or the number of a
#: capture, which are counted on.
_AS_IT_IS, _TO_CAPTURE = 0, 1
_KEPT = (
    "a tensor of an earlier step is kept with its graph, or a node of autograd has a hook: keep "
    "tensor.detach(), or a hook of the parameter"
)


@dataclass
class _State:
    """What is known of one kind of mini-batch.

    Attributes:
        read: for each microbatch, the positions of the tensors that it reads.
        calls: since it was last captured, or from the first on.
        captures: how often it was.
        number: of the last capture; the same on all ranks of the tensor-parallel group.
        draws: how often random numbers were drawn in each pass, when it was taken down.
        tapes: of its forward passes, when it was taken down.
        is_taken_down: the mini-batch in progress is.
        why_not: why it is not captured any more.
    """

    read: list[set[int]]
    calls: int = 0
    captures: int = 0
    number: int = 0
    draws: list[int] = field(default_factory=list)
    tapes: Tapes | None = None
    is_taken_down: bool = False
    why_not: str = ""
    replay: Replay | None = None
    told: set[str] = field(default_factory=set)


class Replays:
    """The captured mini-batches of one step function.

    Args:
        runtime: the state of the library in this process.
        graphs: capture passes.
        name: of the step function, for messages.
        is_asked_for: the script did; else it is not told of each mini-batch that runs as it is, and
            passes are captured only where there is much room.
    """

    def __init__(
        self, runtime: TorchRuntime, graphs: Graphs, name: str, *, is_asked_for: bool
    ) -> None:
        self._runtime = runtime
        self._name = name
        self._is_asked_for = is_asked_for
        self._graphs = graphs
        self._group = runtime.tensor_group
        self._numbers = itertools.count(_TO_CAPTURE + 1)
        self._head_start = HeadStart(runtime)
        self._states: weakref.WeakKeyDictionary[Prepared, _State] = weakref.WeakKeyDictionary()

    def start(self, batch: MiniBatch) -> None:
        """Starts a mini-batch before its Python has run, if it is likely to run as the last one."""
        self._head_start.begin(batch)

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
        if (state := self._states.get(prepared)) is None:
            state = self._states[prepared] = self._new_state(prepared)
        read = [
            [each if position in read else None for position, each in enumerate(one)]
            for one, read in zip(inputs, state.read, strict=True)
        ]
        parameters = (
            [each for model in models for _, each in model.local_named_parameters()]
            if prepared.differentiated
            else []
        )
        offer = self._offer(state, parameters, read, scales)
        everyones = self._group.everyones([offer, state.captures < _MOST_CAPTURES])
        offers, can_capture = zip(*everyones, strict=True)
        if _AS_IT_IS not in offers:
            if len(set(offers)) > 1 and all(can_capture):
                self._drop(state, "another rank of the tensor-parallel group captures anew")
            elif len(set(offers)) == 1:
                if state.replay is None:
                    self._capture(state, prepared, parameters, read, scales, enter_pass)
                if (replay := state.replay) is not None:
                    replay.begin(read, scales, is_started=self._head_start.was_for(batch, replay))
                    self._head_start.expect(batch, prepared, models, replay, parameters)
                    return replay
        if state.is_taken_down:
            runtime = self._runtime
            return TapedComputation(
                prepared.passes, read, scales, runtime.random, runtime.fake_mode
            )
        return Computation(prepared.passes, inputs, scales)

    def _new_state(self, prepared: Prepared) -> _State:
        rank = self._runtime.coordinates.pp_rank
        nodes = {plan: _nodes(plan, rank) for plan in prepared.plans}
        deciding = [node for each in nodes.values() for node in each if node.decides]
        return _State(
            [_read(nodes[plan]) for plan in prepared.plans],
            why_not=f"{deciding[0].name} decides by numbers" if deciding else "",
        )

    def _offer(
        self,
        state: _State,
        parameters: Sequence[nn.Parameter],
        inputs: Inputs,
        scales: Sequence[Scale],
    ) -> int:
        """Returns what this rank can do: run a mini-batch as it is, capture it, or a capture."""
        state.is_taken_down = False
        if state.why_not:
            self._tell(state, state.why_not)
            return _AS_IT_IS
        state.calls += 1
        if reason := takes_part():
            self._tell(state, reason)
            return _AS_IT_IS
        if state.replay is None and (state.calls <= _FIRST or state.tapes is None):
            state.is_taken_down = state.calls >= _FIRST and state.tapes is None
            return _AS_IT_IS
        if state.replay is not None and (reason := self._broken(state.replay)):
            self._drop(state, reason)
            return _AS_IT_IS
        if any(each.grad is not None for each in parameters):
            self._tell(state, "gradients of an earlier step are added to")
            return _AS_IT_IS
        if state.replay is None:
            state.why_not = self._reason(parameters, inputs)
            self._tell(state, state.why_not)
            assert state.tapes is not None
            if refusal := next(filter(None, (each.refusal for each in state.tapes.values())), ""):
                state.captures += 1
                self._drop(state, refusal)
            return _AS_IT_IS if state.why_not or state.tapes is None else _TO_CAPTURE
        if state.replay.is_held:
            self._tell(state, "gradients of an earlier step are still held")
            return _AS_IT_IS
        if any(is_accumulation_kept(each) for each in parameters if each.requires_grad):
            self._tell(state, _KEPT)
            return _AS_IT_IS
        if not state.replay.fits(inputs, scales):
            self._drop(state, "arguments have other types, or losses another scale")
            return _AS_IT_IS
        return state.number

    def _broken(self, replay: Replay) -> str:
        """Returns why a capture is of no use any more; "" if it is."""
        if replay.num_off:
            return "the Python of its modules did something else"
        return "the memory or a hook of a tensor has changed" if replay.has_moved else ""

    def note(self, prepared: Prepared, computation: Computation) -> None:
        """Takes note of a mini-batch that ran as it is."""
        state = self._states.get(prepared)
        if state is not None and isinstance(computation, TapedComputation):
            state.draws, state.tapes = self._runtime.random.draws, computation.tapes

    def _capture(
        self,
        state: _State,
        prepared: Prepared,
        parameters: Sequence[nn.Parameter],
        inputs: Inputs,
        scales: Sequence[Scale],
        enter_pass: EnterPass,
    ) -> None:
        """Captures a mini-batch, if all ranks of the tensor-parallel group can. Collective: it."""
        state.captures += 1
        state.number = next(self._numbers)
        random = self._runtime.random
        draws = [CapturedDraws(random, count) for count in state.draws]
        tapes, state.tapes = state.tapes, None
        assert tapes is not None
        replay = None
        try:
            captured = capture(
                self._graphs,
                prepared.passes,
                tapes,
                inputs,
                scales,
                parameters,
                draws,
                random,
                self._group,
                enter_pass,
                reuses_memory=self._runtime.links.lays_messages,
            )
            replay = Replay(captured, parameters, random, self._group)
        except Exception as error:  # the mini-batch runs as it is, and fails if it fails so
            state.why_not = str(error).partition("\n")[0] or type(error).__name__
        reasons = self._group.everyones_texts(state.why_not)
        state.why_not = state.why_not or next(filter(None, reasons), "")
        self._tell(state, state.why_not)
        state.replay = None if state.why_not else replay
        if state.replay is not None and not self._is_asked_for:
            logger.info(
                "step function %s launches its passes as CUDA graphs from now on, on rank %d",
                self._name,
                self._runtime.rank,
            )

    def _reason(self, parameters: Sequence[nn.Parameter], inputs: Inputs) -> str:
        """Returns why a kind of mini-batch is not captured; "" if it is."""
        runtime = self._runtime
        tensors = [each for one in inputs for each in one if each is not None]
        if sum(each.replay is not None for each in self._states.values()) == _MOST_KEPT:
            return f"{_MOST_KEPT} kinds of mini-batches do already"
        if not (self._is_asked_for or self._graphs.has_room):
            return (
                "graphs keep the memory of a step, and there is not as much again; "
                "smp.step(cuda_graphs=True) does without"
            )
        if any(map(accumulation_hooks, parameters)):
            return "a parameter has a hook that runs when its gradient has been added up"
        if any(is_accumulation_kept(each) for each in parameters if each.requires_grad):
            # It may have hooks, and a GPU would add gradients up on a stream that captures nothing.
            return _KEPT
        if any(each.device != runtime.device or each.requires_grad for each in tensors):
            return "an argument is on another device, or requires a gradient"
        return ""

    def _drop(self, state: _State, reason: str) -> None:
        """Drops what was captured; it may be captured once more."""
        state.replay = state.tapes = None
        state.calls = 0
        if state.captures >= _MOST_CAPTURES:
            state.why_not = reason
        self._tell(state, reason)

    def _tell(self, state: _State, reason: str) -> None:
        if reason and reason not in state.told:
            state.told.add(reason)
            logger.log(
                logging.WARNING if self._is_asked_for else logging.INFO,
                "step function %s runs a mini-batch without CUDA graphs on rank %d: %s",
                self._name,
                self._runtime.rank,
                reason,
            )


def replays_of(
    runtime: TorchRuntime, name: str, cuda_graphs: bool | Literal["auto"]
) -> Replays | None:
    """Returns the captured mini-batches of a step function; None where none are captured.

    Args:
        runtime: the state of the library in this process.
        name: of the step function.
        cuda_graphs: whether the script asks for them; "auto": they are captured where the step is
            recorded anyway.
    """
    is_recorded = runtime.topology.pp_size > 1
    if not cuda_graphs or (cuda_graphs == "auto" and not is_recorded):
        return None
    graphs = graphs_of(runtime.device, uses_streams=runtime.config.tensor_parallel_degree > 1)
    if graphs is None:
        return None
    reason = ""
    if runtime.config.offload_activations:
        reason = "activations are offloaded"
    elif runtime.config.sharded_data_parallel_degree > 1:
        reason = "parameters are in shards"
    if reason:
        level = logging.INFO if cuda_graphs == "auto" else logging.WARNING
        logger.log(level, "step function %s runs without CUDA graphs: %s", name, reason)
        return None
    # NCCL waits for the end of all graphs that have captured its exchanges, before it leaves.
    runtime.replacements.callback(graphs.release)
    return Replays(runtime, graphs, name, is_asked_for=cuda_graphs is True)


def _nodes(plan: Plan, pp_rank: int) -> list[Node]:
    """Returns what a rank computes of a microbatch."""
    return [node for each in plan.segments if each.rank == pp_rank for node in each.nodes]


def _read(nodes: Sequence[Node]) -> set[int]:
    """Returns the positions of the tensors, those of the call and behind them, that nodes read."""
    kinds = (NodeKind.INPUT, NodeKind.CONSTANT)
    return {node.target for node in nodes if node.kind in kinds and isinstance(node.target, int)}
