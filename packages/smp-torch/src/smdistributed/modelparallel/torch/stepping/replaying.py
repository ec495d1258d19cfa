"""Mini-batches that run as CUDA graphs: which, and from when on.

Each rank decides for itself, since what goes between the ranks of a pipeline is the same either
way; those of a tensor-parallel group, whose modules exchange within a pass, decide together. The
first mini-batches of a kind run as they are, which compiles and chooses kernels; then their passes
are captured. A mini-batch runs as captured while everything is as it was that the Python in its
modules would see.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.backward import is_accumulation_kept
from smdistributed.modelparallel.torch.execute.executor import EnterPass
from smdistributed.modelparallel.torch.execute.graphs import Graphs, graphs_of
from smdistributed.modelparallel.torch.execute.passes import Inputs
from smdistributed.modelparallel.torch.execute.premises import Premises
from smdistributed.modelparallel.torch.execute.replay import Replay, capture
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.execute.surroundings import takes_part
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.plan.segments import Plan
from smdistributed.modelparallel.torch.random.keys import CapturedDraws
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.nested import opaque_objects
from smdistributed.modelparallel.torch.record.turns import accumulation_hooks
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import MiniBatch
from smdistributed.modelparallel.torch.stepping.head_start import HeadStart
from smdistributed.modelparallel.torch.stepping.preparing import Prepared

logger = logging.getLogger(__name__)

#: Mini-batches of a kind that run before their passes are captured.
_FIRST = 2
#: How often those of a kind are captured, if what they rely on changes.
_MOST_CAPTURES = 4
#: Kinds whose captures are kept; each has the memory of its gradients.
_MOST_KEPT = 4
#: What a rank offers its tensor-parallel group: to run as it is, or to capture; or the number of a
#: capture, which are counted on.
_AS_IT_IS, _TO_CAPTURE = 0, 1


@dataclass
class _State:
    """What is known of one kind of mini-batch.

    Attributes:
        nodes: what this rank computes.
        read: for each microbatch, the positions of the tensors that it reads.
        calls: since it was last captured, or from the first on.
        captures: how often it was.
        number: of the last capture; the same on all ranks of the tensor-parallel group.
        draws: how often random numbers were drawn in each pass, when it ran last.
        why_not: why it is not captured any more.
    """

    nodes: list[Node]
    read: list[set[int]]
    calls: int = 0
    captures: int = 0
    number: int = 0
    draws: list[int] = field(default_factory=list)
    why_not: str = ""
    replay: Replay | None = None
    premises: Premises | None = None
    told: set[str] = field(default_factory=set)


class Replays:
    """The captured mini-batches of one step function.

    Args:
        runtime: the state of the library in this process.
        graphs: capture passes.
        name: of the step function, for messages.
    """

    def __init__(self, runtime: TorchRuntime, graphs: Graphs, name: str) -> None:
        self._runtime = runtime
        self._name = name
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
    ) -> Replay | None:
        """Returns what runs a mini-batch as captured, with its tensors; None: run it as it is.

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
            rank = self._runtime.coordinates.pp_rank
            nodes = {plan: _nodes(plan, rank) for plan in dict.fromkeys(prepared.plans)}
            read = [_read(nodes[plan]) for plan in prepared.plans]
            state = self._states[prepared] = _State(list(itertools.chain(*nodes.values())), read)
        inputs = [
            [each if position in read else None for position, each in enumerate(one)]
            for one, read in zip(inputs, state.read, strict=True)
        ]
        parameters = (
            [each for model in models for _, each in model.local_named_parameters()]
            if prepared.differentiated
            else []
        )
        offer = self._offer(state, parameters, inputs, scales)
        everyones = self._group.everyones([offer, state.captures < _MOST_CAPTURES])
        offers, can_capture = zip(*everyones, strict=True)
        if _AS_IT_IS in offers:
            return None
        if len(set(offers)) > 1:
            if not all(can_capture):
                return None
            self._tell(state, "another rank of the tensor-parallel group captures anew")
            state.replay = state.premises = None
        if state.replay is None:
            self._capture(state, prepared, parameters, inputs, scales, enter_pass)
        replay, premises = state.replay, state.premises
        if replay is not None and premises is not None:
            replay.begin(inputs, scales, is_started=self._head_start.was_for(batch, replay))
            self._head_start.expect(batch, prepared, models, replay, premises, parameters)
        return replay

    def _offer(
        self,
        state: _State,
        parameters: Sequence[nn.Parameter],
        inputs: Inputs,
        scales: Sequence[Scale],
    ) -> int:
        """Returns what this rank can do: run a mini-batch as it is, capture it, or a capture."""
        if state.why_not:
            return _AS_IT_IS
        state.calls += 1
        if reason := takes_part():
            self._tell(state, reason)
            return _AS_IT_IS
        if state.replay is not None and state.premises is not None:
            if reason := state.premises.broken_by():
                self._give_up(state, reason)
                return _AS_IT_IS
        elif state.calls <= _FIRST:
            return _AS_IT_IS
        if any(each.grad is not None for each in parameters):
            self._tell(state, "gradients of an earlier step are added to")
            return _AS_IT_IS
        if state.replay is None:
            state.why_not = self._reason(state.nodes, parameters, inputs)
            if state.why_not:
                self._tell(state, state.why_not)
            return _AS_IT_IS if state.why_not else _TO_CAPTURE
        if state.replay.is_held:
            self._tell(state, "gradients of an earlier step are still held")
            return _AS_IT_IS
        if not state.replay.fits(inputs, scales):
            self._give_up(state, "arguments have other types, or losses another scale")
            return _AS_IT_IS
        return state.number

    def note_draws(self, prepared: Prepared) -> None:
        """Takes note of how often a mini-batch drew, which ran as it is."""
        if (state := self._states.get(prepared)) is not None:
            state.draws = self._runtime.random.draws

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
        premises = Premises(
            {node.target: None for node in state.nodes if node.kind is NodeKind.LEAF},
            [node.target for node in state.nodes if node.kind is NodeKind.ATTRIBUTE],
            self._runtime.device,
            _code_of(state.nodes),
        )
        random = self._runtime.random
        counts = state.draws or [0] * len(prepared.executor.actions)
        draws = [CapturedDraws(random, count) for count in counts]
        replay = None
        try:
            premises.check_all_are_seen()
            with random.kept_on_host("code of a module"):
                replay = capture(
                    self._graphs,
                    prepared.passes,
                    inputs,
                    scales,
                    parameters,
                    draws,
                    self._group,
                    enter_pass,
                    reuses_memory=self._runtime.links.lays_messages,
                )
        except Exception as error:  # the mini-batch runs as it is, and fails if it fails so
            state.why_not = str(error).partition("\n")[0] or type(error).__name__
        else:
            if changed := premises.broken_by():
                state.why_not = f"{changed} while its passes ran"
        reasons = self._group.everyones_texts(state.why_not)
        if reason := state.why_not or next(filter(None, reasons), ""):
            state.why_not = reason
            premises.put_back()
            self._tell(state, reason)
        else:
            state.replay, state.premises = replay, premises

    def _reason(
        self,
        nodes: Sequence[Node],
        parameters: Sequence[nn.Parameter],
        inputs: Inputs,
    ) -> str:
        """Returns why a kind of mini-batch is not captured; "" if it is."""
        runtime = self._runtime
        tensors = [each for one in inputs for each in one if each is not None]
        if sum(each.replay is not None for each in self._states.values()) == _MOST_KEPT:
            return f"{_MOST_KEPT} kinds of mini-batches do already"
        if any(map(accumulation_hooks, parameters)):
            return "a parameter has a hook that runs when its gradient has been added up"
        if any(is_accumulation_kept(each) for each in parameters if each.requires_grad):
            # It may have hooks, and a GPU would add gradients up on a stream that captures nothing.
            return (
                "a tensor of an earlier step is kept with its graph, or a node of autograd has a "
                "hook: keep tensor.detach(), or a hook of the parameter"
            )
        if any(each.device != runtime.device or each.requires_grad for each in tensors):
            return "an argument is on another device, or requires a gradient"
        for node in nodes:
            if node.decides:
                return f"{node.name} decides by numbers"
            if _writes_elsewhere(node, runtime.device):
                return f"{node.name} writes to what is not on the device"
        return ""

    def _give_up(self, state: _State, reason: str) -> None:
        """Drops what was captured; it may be captured once more."""
        state.replay = state.premises = None
        state.calls = 0
        if state.captures >= _MOST_CAPTURES:
            state.why_not = reason
        self._tell(state, reason)

    def _tell(self, state: _State, reason: str) -> None:
        if reason not in state.told:
            state.told.add(reason)
            logger.warning(
                "step function %s runs a mini-batch without CUDA graphs on rank %d: %s",
                self._name,
                self._runtime.rank,
                reason,
            )


def replays_of(runtime: TorchRuntime, name: str) -> Replays | None:
    """Returns the captured mini-batches of a step function; None where none can be captured.

    Args:
        runtime: the state of the library in this process.
        name: of the step function.
    """
    graphs = graphs_of(runtime.device, uses_streams=runtime.config.tensor_parallel_degree > 1)
    if graphs is None:
        return None
    reason = ""
    if runtime.config.offload_activations:
        reason = "activations are offloaded"
    elif runtime.config.sharded_data_parallel_degree > 1:
        reason = "parameters are in shards"
    if reason:
        logger.warning("step function %s runs without CUDA graphs: %s", name, reason)
        return None
    # NCCL waits for the end of all graphs that have captured its exchanges, before it leaves.
    runtime.replacements.callback(graphs.release)
    return Replays(runtime, graphs, name)


def _writes_elsewhere(node: Node, device: torch.device) -> bool:
    """Whether a module writes to arrays of NumPy, or to tensors on another device."""
    for module, names in node.stateful.items():
        for kept in (vars(module).get(name, module._buffers.get(name)) for name in names):
            is_array = type(kept).__module__ == "numpy"
            if is_array or (isinstance(kept, torch.Tensor) and kept.device != device):
                return True
    return False


def _code_of(nodes: Sequence[Node]) -> list[Any]:
    """Returns what modules are given that may hold code or state, and functions with backwards."""
    found = []
    for node in nodes:
        if node.kind is NodeKind.LEAF:
            found += opaque_objects((node.args, node.kwargs))
        kind = getattr(node.target, "__self__", None)
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            found.append(kind)
    return [each for each in found if not isinstance(each, Value)]


def _nodes(plan: Plan, pp_rank: int) -> list[Node]:
    """Returns what a rank computes of a microbatch."""
    return [node for each in plan.segments if each.rank == pp_rank for node in each.nodes]


def _read(nodes: Sequence[Node]) -> set[int]:
    """Returns the positions of the tensors, those of the call and behind them, that nodes read."""
    kinds = (NodeKind.INPUT, NodeKind.CONSTANT)
    return {node.target for node in nodes if node.kind in kinds and isinstance(node.target, int)}
