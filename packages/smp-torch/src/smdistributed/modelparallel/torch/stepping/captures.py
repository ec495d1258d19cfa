"""When the mini-batches of a step function are captured as CUDA graphs, and launched.

The first mini-batches of a kind run as they are, which compiles and chooses kernels; the last of
them is taken down on tapes, from which the next one is captured. From then on Python confirms the
graphs. Ranks that compute together capture and launch together.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import torch

from smdistributed.modelparallel.torch.compat.private.backward import is_accumulation_kept
from smdistributed.modelparallel.torch.execute.graphs import Graphs, graphs_of
from smdistributed.modelparallel.torch.record.leaves.gradient_hooks import accumulation_hooks
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)

#: Mini-batches of a kind that run before their passes are captured; the last of them is taken down.
_FIRST = 2
#: How often those of a kind are captured, if what they rely on changes.
_MOST_CAPTURES = 4
#: Kinds whose captures are kept; each has the memory of its gradients.
_MOST_KEPT = 4
#: What a rank offers those that it computes with: to run as it is, or to capture; or the number of
#: a capture, which are counted on.
_AS_IT_IS, _TO_CAPTURE = 0, 1
_KEPT = (
    "a tensor of an earlier step is kept with its graph, or a node of autograd has a hook: keep "
    "tensor.detach(), or a hook of the parameter"
)


class Replay(Protocol):
    """A mini-batch that was captured."""

    @property
    def other_way(self) -> str:
        """Where Python of the last one went another way; "" if it did not."""

    @property
    def has_moved(self) -> bool:
        """Whether something is elsewhere that the kernels read."""

    @property
    def is_held(self) -> bool:
        """Whether somebody still has a gradient of the last one, or a view of it."""

    @property
    def wishes(self) -> int:
        """A sum that ranks have in common which exchange the same in it."""


_Replay = TypeVar("_Replay", bound=Replay)
_Tapes = TypeVar("_Tapes")


class Together(Protocol):
    """The ranks that capture and launch together."""

    def everyones(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, as many from each. Collective."""

    def everyones_texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks. Collective."""


@dataclass(eq=False)
class Kind(Generic[_Tapes, _Replay]):
    """What is known of one kind of mini-batch.

    Attributes:
        calls: since it was last captured, or from the first on.
        captures: how often it was.
        number: of the last capture; the same on all ranks that compute together.
        tapes: what was taken down.
        is_taken_down: the mini-batch in progress is.
        replay: as it was captured.
        why_not: why it is not captured any more.
    """

    calls: int = 0
    captures: int = 0
    number: int = 0
    tapes: _Tapes | None = None
    is_taken_down: bool = False
    replay: _Replay | None = None
    why_not: str = ""
    told: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Due(Generic[_Tapes, _Replay]):
    """A mini-batch that is about to run.

    Attributes:
        parameters: that get gradients.
        inputs: of the mini-batch.
        around: what takes part in it from outside; see ``takes_part``.
        adds_up: tells whether there are gradients that this one adds to.
        refusal: returns why no graph does what was taken down; "" if one does.
        fits: tells whether what was captured takes the mini-batch.
        capture: captures it.
    """

    parameters: Sequence[torch.Tensor]
    inputs: Iterable[torch.Tensor]
    around: str
    adds_up: Callable[[], bool]
    refusal: Callable[[_Tapes], str]
    fits: Callable[[_Replay], bool]
    capture: Callable[[_Tapes], _Replay]


class Captures(Generic[_Tapes, _Replay]):
    """Decides for each mini-batch of one step function.

    Args:
        graphs: capture passes.
        together: the ranks that decide together.
        name: of the step function, for messages.
        rank: of this process.
        device: where arguments are.
        is_asked_for: the script asks for graphs; else it is not told of each mini-batch that runs
            as it is, and passes are captured only where there is much room.
    """

    def __init__(
        self,
        graphs: Graphs,
        together: Together,
        name: str,
        rank: int,
        device: torch.device,
        *,
        is_asked_for: bool,
    ) -> None:
        self._graphs = graphs
        self._together = together
        self._name = name
        self._rank = rank
        self._device = device
        self._is_asked_for = is_asked_for
        self._numbers = itertools.count(_TO_CAPTURE + 1)
        #: Those that were captured.
        self._kept: weakref.WeakSet[Kind[_Tapes, _Replay]] = weakref.WeakSet()

    def decide(self, kind: Kind[_Tapes, _Replay], due: Due[_Tapes, _Replay]) -> _Replay | None:
        """Returns what a mini-batch is launched from; None if it runs as it is.

        Collective: the ranks that decide together.

        Args:
            kind: of the mini-batch.
            due: the mini-batch.
        """
        offer = self._offer(kind, due)
        everyones = self._together.everyones([offer, kind.captures < _MOST_CAPTURES])
        offers, can_capture = zip(*everyones, strict=True)
        if _AS_IT_IS in offers:
            return None
        if len(set(offers)) > 1:
            if all(can_capture):
                self.drop(kind, "another rank that computes with this one captures anew")
            return None
        if kind.replay is None:
            self._capture(kind, due.capture)
        return kind.replay

    def _offer(self, kind: Kind[_Tapes, _Replay], due: Due[_Tapes, _Replay]) -> int:
        """Returns what this rank can do: run a mini-batch as it is, capture it, or a capture."""
        kind.is_taken_down = False
        if not kind.why_not and kind.replay is None and self._is_full:
            kind.why_not = f"{_MOST_KEPT} kinds of mini-batches do already"
        if kind.why_not:
            kind.tapes = None
            self.tell(kind, kind.why_not)
            return _AS_IT_IS
        kind.calls += 1
        if due.around:
            self.tell(kind, due.around)
            return _AS_IT_IS
        replay, tapes = kind.replay, kind.tapes
        if replay is None and (kind.calls <= _FIRST or tapes is None):
            kind.is_taken_down = kind.calls >= _FIRST and tapes is None
            return _AS_IT_IS
        if replay is not None and (reason := _broken(replay)):
            self.drop(kind, reason)
            return _AS_IT_IS
        if due.adds_up():
            self.tell(kind, "gradients of an earlier step are added to")
            return _AS_IT_IS
        if replay is None:
            assert tapes is not None
            kind.why_not = self._reason(due.parameters, due.inputs)
            self.tell(kind, kind.why_not)
            if reason := due.refusal(tapes):
                kind.captures += 1
                self.drop(kind, reason)
            return _AS_IT_IS if kind.why_not or kind.tapes is None else _TO_CAPTURE
        if replay.is_held:
            self.tell(kind, "gradients of an earlier step are still held")
            return _AS_IT_IS
        if _are_kept(due.parameters):
            self.tell(kind, _KEPT)
            return _AS_IT_IS
        if not due.fits(replay):
            self.drop(kind, "arguments have other types, or losses another scale")
            return _AS_IT_IS
        return kind.number

    def _capture(self, kind: Kind[_Tapes, _Replay], capture: Callable[[_Tapes], _Replay]) -> None:
        """Captures a mini-batch, if all ranks can. Collective."""
        kind.captures += 1
        kind.number = next(self._numbers)
        tapes, kind.tapes = kind.tapes, None
        assert tapes is not None
        replay = None
        try:
            replay = capture(tapes)
        except Exception as error:  # the mini-batch runs as it is, and fails if it fails so
            kind.why_not = str(error).partition("\n")[0] or type(error).__name__
        reasons = self._together.everyones_texts(kind.why_not)
        kind.why_not = kind.why_not or next(filter(None, reasons), "")
        if replay is not None and not kind.why_not:
            wishes = self._together.everyones([replay.wishes])
            if any(each != wishes[0] for each in wishes):
                kind.why_not = "ranks that compute together exchange different things"
        self.tell(kind, kind.why_not)
        if kind.why_not:
            return
        kind.replay = replay
        self._kept.add(kind)
        if not self._is_asked_for:
            logger.info(
                "step function %s launches its passes as CUDA graphs from now on, on rank %d",
                self._name,
                self._rank,
            )

    def _reason(self, parameters: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor]) -> str:
        """Returns why a kind of mini-batch is not captured; "" if it is."""
        if not (self._is_asked_for or self._graphs.has_room):
            return (
                "graphs keep the memory of a step, and there is not as much again; "
                "smp.step(cuda_graphs=True) does without"
            )
        if any(map(accumulation_hooks, parameters)):
            return "a parameter has a hook that runs when its gradient has been added up"
        if _are_kept(parameters):
            # It may have hooks, and a GPU would add gradients up on a stream that captures nothing.
            return _KEPT
        if any(each.device != self._device or each.requires_grad for each in inputs):
            return "an argument is on another device, or requires a gradient"
        return ""

    @property
    def _is_full(self) -> bool:
        return len(self._kept) == _MOST_KEPT

    def drop(self, kind: Kind[_Tapes, _Replay], reason: str) -> None:
        """Drops what was captured; it may be captured once more."""
        self._kept.discard(kind)
        kind.replay = kind.tapes = None
        kind.calls = 0
        if kind.captures >= _MOST_CAPTURES:
            kind.why_not = reason
        self.tell(kind, reason)

    def tell(self, kind: Kind[_Tapes, _Replay], reason: str) -> None:
        """Says why a mini-batch runs as it is, once."""
        if reason and reason not in kind.told:
            kind.told.add(reason)
            logger.log(
                logging.WARNING if self._is_asked_for else logging.INFO,
                "step function %s runs a mini-batch without CUDA graphs on rank %d: %s",
                self._name,
                self._rank,
                reason,
            )


def graphs_for(
    runtime: TorchRuntime, name: str, cuda_graphs: bool | Literal["auto"], reason: str
) -> Graphs | None:
    """Returns what captures the passes of a step function; None where nothing does.

    Args:
        runtime: the state of the library in this process.
        name: of the step function.
        cuda_graphs: whether the script asks for them.
        reason: why they are not captured; "" if they are, as far as is known.
    """
    config = runtime.config
    has_streams = config.tensor_parallel_degree > 1 or config.sharded_data_parallel_degree > 1
    graphs = graphs_of(runtime.device, uses_streams=has_streams) if cuda_graphs else None
    if graphs is None:
        return None
    if reason := "activations are offloaded" if config.offload_activations else reason:
        level = logging.INFO if cuda_graphs == "auto" else logging.WARNING
        logger.log(level, "step function %s runs without CUDA graphs: %s", name, reason)
        return None
    # NCCL waits for the end of all graphs that have captured its exchanges, before it leaves.
    runtime.replacements.callback(graphs.release)
    return graphs


def _are_kept(parameters: Iterable[torch.Tensor]) -> bool:
    return any(is_accumulation_kept(each) for each in parameters if each.requires_grad)


def _broken(replay: Replay) -> str:
    """Returns why a capture is of no use any more; "" if it is."""
    if replay.other_way:
        return f"the Python of its modules did something else: {replay.other_way}"
    return "the memory or a hook of a tensor has changed" if replay.has_moved else ""
