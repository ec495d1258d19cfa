"""The arguments of a step: agreeing on them, handing them out, splitting them.

Rank 0 of a pipeline says what it was called with (shapes, types, plain Python arguments, flags);
the others take its word, and the inputs that they need, from it. Published scripts pass empty
tensors on the other ranks.
"""

from __future__ import annotations

import enum
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.microbatch import SplitRules, split_arguments
from smdistributed.modelparallel.torch.execute.links import Links
from smdistributed.modelparallel.torch.record.nested import (
    is_plain_value,
    map_tensors,
    take_apart,
    tensors_in,
)
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.runtime.tensors import TENSORS
from smdistributed.modelparallel.torch.stepping.first_rank import hear, say

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class TensorKind:
    """What a recording depends on of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorKind:
        """Returns the kind of a tensor."""
        return TensorKind(
            tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad
        )


@dataclass(frozen=True)
class State:
    """What a recording depends on besides the arguments.

    Attributes:
        modes: grad mode, inference mode, autocast.
        models: for each model of the process its number, version, training flags and
            requires_grad flags.
    """

    modes: tuple[object, ...]
    models: tuple[tuple[int, int, tuple[bool, ...], tuple[bool, ...]], ...]

    def agrees_with(self, other: State) -> bool:
        """Whether two ranks are in one state; models that only one still has do not count."""
        theirs = {each[0]: each for each in other.models}
        return self.modes == other.modes and all(
            theirs.get(each[0], each) == each for each in self.models
        )


@dataclass(frozen=True)
class CallKind:
    """What a recording depends on of a call.

    Attributes:
        tensors: the kinds of its tensor arguments, in order.
        constants: its other arguments: plain values as they are, objects by number.
        state: training flags, grad mode and the like.
    """

    tensors: tuple[TensorKind, ...]
    constants: tuple[object, ...]
    state: State


@dataclass(frozen=True)
class Header:
    """What rank 0 of the pipeline tells the others at the start of a call.

    Attributes:
        kind: what it was called with.
        seed: of the random numbers of this step.
        own: for each microbatch, what its recording depends on beyond the whole call; see ``own``.
        choices: for each microbatch, which known recording fits; None where one must be made.
    """

    kind: CallKind
    seed: int
    own: tuple[tuple[object, ...], ...]
    choices: tuple[int | None, ...]


class StepInputs:
    """The arguments of one step function, on one rank.

    Args:
        runtime: the state of the library in this process.
        links: the way to the other ranks of the pipeline.
        rules: which arguments are split.
    """

    def __init__(self, runtime: TorchRuntime, links: Links, rules: SplitRules) -> None:
        self._runtime = runtime
        self._links = links
        self._rules = rules
        self._pp_rank = runtime.coordinates.pp_rank
        self._numbers = _ObjectNumbers()

    def kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind:
        """Returns what this rank was called with."""
        return CallKind(
            tuple(TensorKind.of(tensor) for tensor in tensors_in((args, kwargs))),
            tuple(self._numbers.constants((args, kwargs))),
            self._state(),
        )

    def own(self, kind: CallKind, calls: Sequence[Call]) -> tuple[tuple[object, ...], ...]:
        """Returns what each microbatch has of its own besides tensors.

        That is what objects with ``smp_slice`` gave it; all else is the same for all microbatches.
        """
        if _Mark.SLICED not in kind.constants:
            return ((),) * len(calls)
        return tuple(tuple(self._numbers.constants(call)) for call in calls)

    def _state(self) -> State:
        device = self._runtime.device.type
        return State(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            ),
            tuple(
                (model.number, model.holder.version, *model.holder.fakes.flags())
                for model in self._runtime.live_models()
            ),
        )

    def agree(self, mine: CallKind, make: Callable[[], Header]) -> Header:
        """Returns what rank 0 of the pipeline was called with. Collective: PP_GROUP.

        Args:
            mine: what this rank was called with.
            make: makes the header; called on rank 0 of the pipeline.

        Raises:
            SMPError: this rank was called in another way.
            Exception: what ``make`` raised, on every rank.
        """
        communicator = self._runtime.communicator
        header: Header = say(communicator, make) if self._pp_rank == 0 else hear(communicator)
        theirs = header.kind
        if len(theirs.tensors) != len(mine.tensors):
            raise SMPError(
                f"rank {self._runtime.rank}: the step function was called with "
                f"{len(mine.tensors)} tensors here and with {len(theirs.tensors)} on the first "
                "rank of the pipeline; every rank must pass the same structure (empty tensors of "
                "the right batch size will do)."
            )
        if not mine.state.agrees_with(theirs.state):
            raise SMPError(
                f"rank {self._runtime.rank}: training flags, requires_grad, grad mode or the "
                "modules of a model differ from those on the first rank of the pipeline; call "
                "model.train(), model.eval() and the like on every rank."
            )
        return header

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Call], Sequence[float]]:
        """Returns the calls of the microbatches, and their shares of the batch."""
        microbatches = self._runtime.config.microbatches
        return split_arguments(TENSORS, self._rules, microbatches, args, kwargs)

    def stand_ins(self, kind: CallKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Returns the arguments with fakes of rank 0's tensors in the places of its own."""
        mode = self._runtime.fake_mode

        def fake(kind: TensorKind) -> torch.Tensor:
            with mode:
                tensor = torch.empty(kind.shape, dtype=kind.dtype, device=self._device(kind))
            return tensor.requires_grad_(kind.requires_grad)

        return _with_tensors(args, kwargs, [fake(each) for each in kind.tensors])

    def exchange(
        self,
        kind: CallKind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        needed: Sequence[set[int]],
    ) -> Call:
        """Returns the arguments with rank 0's tensors: real where this rank computes with them.

        Collective: PP_GROUP.

        Args:
            kind: of the call.
            args, kwargs: this rank's arguments.
            needed: for each pp_rank, the positions of the tensors that it computes with.
        """
        if self._pp_rank == 0:
            tensors = tensors_in((args, kwargs))
            transfers = [
                self._links.send(tensors[position], target)
                for target in range(1, len(needed))
                for position in sorted(needed[target])
            ]
            for transfer in transfers:
                transfer.wait()
            return args, kwargs
        received = []
        for position, each in enumerate(kind.tensors):
            if position in needed[self._pp_rank]:
                buffer = torch.empty(each.shape, dtype=each.dtype, device=self._device(each))
                tensor = self._links.receive(buffer, 0).wait()
            else:
                tensor = torch.empty(each.shape, dtype=each.dtype, device="meta")
            received.append(tensor.requires_grad_(each.requires_grad))
        return _with_tensors(args, kwargs, received)

    def _device(self, kind: TensorKind) -> torch.device:
        return torch.device("cpu") if kind.device_type == "cpu" else self._runtime.device


def _with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> Call:
    replacements = iter(tensors)
    replaced: Call = map_tensors((args, kwargs), lambda tensor: next(replacements))
    return replaced


class _Mark(enum.Enum):
    """Stands among constants for a property of the object that follows."""

    SLICED = enum.auto()


class _ObjectNumbers:
    """Numbers for objects, by identity: a recording is for the very model that it was given."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._next = 0

    def constants(self, obj: Any) -> list[object]:
        """Returns what a recording depends on in arguments, tensors left out."""
        if isinstance(obj, torch.Tensor):
            return ["tensor"]
        if is_plain_value(obj):
            return [type(obj).__name__, obj]
        if isinstance(obj, dict):
            return [
                "dict",
                *(each for key, item in obj.items() for each in (str(key), *self.constants(item))),
            ]
        if isinstance(obj, list | tuple | set | frozenset):
            return [type(obj).__name__, *(each for item in obj for each in self.constants(item))]
        mark = [_Mark.SLICED] if hasattr(type(obj), "smp_slice") else []
        parts = take_apart(obj)
        if parts is not None:
            return [*mark, type(obj).__qualname__, *self.constants(parts.items)]
        if type(obj).__module__ == "numpy":
            return ["numpy", str(obj.dtype), obj.shape, hashlib.sha256(obj.tobytes()).hexdigest()]
        return [*mark, type(obj).__qualname__, self._number(obj)]

    def _number(self, obj: Any) -> int:
        key = id(obj)
        if key not in self._known:
            try:
                keeper: Any = weakref.ref(obj, lambda _: self._known.pop(key, None))
            except TypeError:
                keeper = obj  # lives as long as we do, so that its identity stays its own
            self._known[key] = keeper, self._next
            self._next += 1
        return self._known[key][1]
